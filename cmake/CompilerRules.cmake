# Flags that AllFinite's own targets share, and the ones that it refuses.
#
# Fast-math assumes that there is no NaN and no infinity: g++ then compiles isfinite(x) to "true", and nvcc flushes
# subnormals. Either would delete what this library is for, so they end the configuration, wherever they come from.

foreach(language CXX CUDA)
  set(all_flags "${CMAKE_${language}_FLAGS} $ENV{${language}FLAGS}")
  foreach(config "" _DEBUG _RELEASE _RELWITHDEBINFO _MINSIZEREL)
    string(APPEND all_flags " ${CMAKE_${language}_FLAGS${config}}")
  endforeach()
  string(APPEND all_flags " $ENV{NVCC_APPEND_FLAGS} $ENV{NVCC_PREPEND_FLAGS}")
  if(all_flags MATCHES "(-ffast-math|-Ofast|-ffinite-math-only|-funsafe-math-optimizations|[-]use_fast_math|-ftz=true)")
    message(FATAL_ERROR "AllFinite: ${CMAKE_MATCH_1} is refused: it removes the checks for NaN and infinity that "
                        "this library is made of. Take it out of the ${language} flags.")
  endif()
endforeach()

function(allfinite_compile_rules target)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unknown-pragmas -fno-math-errno>
                      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                                             CXX_EXTENSIONS OFF)
endfunction()
