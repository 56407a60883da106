# The library with its CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: what `make sanitize` runs.
#
# Only the kernels are compiled again, once per instruction set as ever: all that touches memory by raw pointers is in
# them, and the torch half is the same object files as in the library. `allfinite_sanitized` is built on request alone,
# into <build>/sanitize, and never installed; a process loads it with the sanitizers' runtimes preloaded.

if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(FATAL_ERROR "AllFinite: ALLFINITE_SANITIZE needs g++ and its shared sanitizer runtimes, but the compiler is "
                      "${CMAKE_CXX_COMPILER_ID}")
endif()

# -O2: the vector code that the kernels are known by, in a quarter of the time of -O3.
# float-cast-overflow is not in `undefined`, yet a NaN or 1e30 that becomes an integer is what these kernels must not do.
# float-divide-by-zero stays off: IEEE defines x / 0, and the kernels count on it.
set(sanitize_flags -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all)
set(sanitized_objects "")
foreach(isa IN LISTS ALLFINITE_CPU_CAPABILITIES)
  set(target allfinite_sanitized_cpu_${isa})
  # The planted faults are compiled as kernels are, so that what finds them would find theirs.
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${ALLFINITE_CPU_KERNELS} tests/sanitize/planted_faults.cpp)
  allfinite_cpu_kernel_rules(${target} ${isa})
  target_compile_options(${target} PRIVATE -O2 -g1 -fno-omit-frame-pointer ${sanitize_flags})
  list(APPEND sanitized_objects $<TARGET_OBJECTS:${target}>)
endforeach()

add_library(allfinite_sanitized SHARED EXCLUDE_FROM_ALL $<TARGET_OBJECTS:allfinite> ${sanitized_objects})
target_link_libraries(allfinite_sanitized PRIVATE $<TARGET_PROPERTY:allfinite,LINK_LIBRARIES> ${sanitize_flags})
set_target_properties(allfinite_sanitized PROPERTIES OUTPUT_NAME allfinite LINKER_LANGUAGE CXX
                                                     LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/sanitize")

# What python itself, which knows no sanitizer, must load first; libstdc++ so that the runtime finds __cxa_throw.
foreach(library libasan.so libstdc++.so)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${library} OUTPUT_VARIABLE path
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  list(APPEND preload "${path}")
endforeach()
list(JOIN preload " " preload)
file(WRITE "${CMAKE_BINARY_DIR}/sanitize/preload" "${preload}")
