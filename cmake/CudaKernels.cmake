# The CUDA half: torch-free kernels as objects (C++17, own architectures), and the bindings that hand them tensors.

set(CMAKE_CUDA_COMPILER "${ALLFINITE_NVCC}")
set(CMAKE_CUDA_ARCHITECTURES "${ALLFINITE_CUDA_ARCHITECTURES}")
enable_language(CUDA)

file(GLOB cuda_kernels CONFIGURE_DEPENDS cuda/*.cu cuda/*/*.cu)
add_library(allfinite_kernels_cuda OBJECT ${cuda_kernels})
allfinite_compile_rules(allfinite_kernels_cuda)
target_compile_features(allfinite_kernels_cuda PRIVATE cuda_std_17)
# A fused multiply-add is written as fmaf(), so that every path of a kernel, and every instance of it, rounds alike.
target_compile_options(allfinite_kernels_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>)
target_include_directories(allfinite_kernels_cuda PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")

file(GLOB cuda_bindings CONFIGURE_DEPENDS csrc/ops/*_cuda.cpp csrc/ops/*/*_cuda.cpp)
target_sources(allfinite PRIVATE ${cuda_bindings} $<TARGET_OBJECTS:allfinite_kernels_cuda>)
target_compile_definitions(allfinite PRIVATE ALLFINITE_CUDA=1)
target_include_directories(allfinite PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_include_directories(allfinite SYSTEM PRIVATE ${ALLFINITE_CUDA_INCLUDE_DIRS})
target_link_libraries(allfinite PRIVATE torchlibs::cuda "${ALLFINITE_CUDART}")
# The shared runtime that torch loads too; CMake's default would link a second, static one.
set_target_properties(allfinite allfinite_kernels_cuda PROPERTIES CUDA_RUNTIME_LIBRARY None)
message(STATUS "AllFinite: CUDA half for sm_${ALLFINITE_CUDA_ARCHITECTURES} with nvcc ${ALLFINITE_CUDA_TOOLKIT_VERSION}")
