# CPU kernels: each source of csrc/cpu is compiled once per instruction set, into a namespace of that name; the
# choice is made at run time (csrc/cpu/capability.h).
#
# The objects may hold no weak symbol: the linker keeps one copy of an inline function for everybody, and it could be
# the AVX-512 one (tests/cpp/check_isa_objects.cmake proves it).

file(GLOB ALLFINITE_CPU_KERNELS CONFIGURE_DEPENDS csrc/cpu/*.cpp csrc/cpu/*/*.cpp)
list(FILTER ALLFINITE_CPU_KERNELS EXCLUDE REGEX "capability\\.cpp$")

set(ALLFINITE_CPU_CAPABILITIES baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND ALLFINITE_CPU_CAPABILITIES avx2 avx512)
endif()
set(baseline_flags "")
set(avx2_flags -mavx2 -mfma -mf16c)
set(avx512_flags -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)

set(ALLFINITE_CPU_OBJECTS "")
# g++ 12 warns about its own AVX-512 header, whose "undefined" vectors are meant to be so.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND avx512_flags -Wno-maybe-uninitialized)
endif()

function(allfinite_cpu_kernel_rules target isa)
  allfinite_compile_rules(${target})
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_definitions(${target} PRIVATE ALLFINITE_ISA=${isa} ALLFINITE_ISA_IS_${isa}=1)
  # -Wno-psabi: vectors are passed between inlined functions only, so no calling convention is at stake.
  # -ffp-contract=off: a fused multiply-add is written as fma(), so that every path of a kernel rounds alike.
  # -fno-trapping-math: no floating-point exception flag is read, and selections may then become masks.
  # -Wno-uninitialized: g++ 12 warns of its own AVX-512 header (GCC bug 105593).
  # -fno-exceptions: kernels throw nothing, and where much is inlined g++ names its handler all the same, by a weak symbol.
  target_compile_options(${target} PRIVATE -O3 ${${isa}_flags} -Wno-psabi -Wno-uninitialized -fno-trapping-math
                                           -ffp-contract=off -fno-exceptions)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
endfunction()

foreach(isa IN LISTS ALLFINITE_CPU_CAPABILITIES)
  add_library(allfinite_kernels_cpu_${isa} OBJECT ${ALLFINITE_CPU_KERNELS})
  allfinite_cpu_kernel_rules(allfinite_kernels_cpu_${isa} ${isa})
  list(APPEND ALLFINITE_CPU_OBJECTS $<TARGET_OBJECTS:allfinite_kernels_cpu_${isa}>)
endforeach()
