# Imported targets for an installed torch (a wheel or a LibTorch archive).
#
# TorchConfig.cmake is not used: with a CUDA build of torch it runs CMake's old FindCUDA, which needs a full toolkit
# even to compile CPU code, and it overrides the CUDA architectures of every target that links torch.
#
#   torchlibs::cpu      headers, c10, torch_cpu, C++20
#   torchlibs::cuda     c10_cuda, torch_cuda             (only where this torch has them)
#   torchlibs::python   torch_python                     (for the pybind11 module only)
#   TorchLibs_ROOT, TorchLibs_VERSION, TorchLibs_CUDA_MAJOR (empty: a CPU-only torch)
#
# Looked for in: TorchLibs_ROOT, CMAKE_PREFIX_PATH and Torch_DIR, the torch that AllFinite was built with, and the
# torch of the python on the PATH.

set(TorchLibs_ROOT "" CACHE PATH "folder that holds torch's include/ and lib/")
set(_torchlibs_version_headers
    include/torch/headeronly/version.h           # torch 2.10 and newer
    include/torch/csrc/api/include/torch/version.h)

function(_torchlibs_version_header root out)
  foreach(header IN LISTS _torchlibs_version_headers)
    if(EXISTS "${root}/${header}")
      file(STRINGS "${root}/${header}" lines REGEX "define TORCH_VERSION_MAJOR [0-9]")
      if(lines)
        set(${out} "${root}/${header}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

if(NOT TorchLibs_ROOT)
  set(_torchlibs_hints ${TORCH_INSTALL_PREFIX} ${Torch_DIR} ${CMAKE_PREFIX_PATH} ${AllFinite_BUILD_TORCH_ROOT})
  foreach(hint IN LISTS _torchlibs_hints)
    foreach(up "" "/.." "/../.." "/../../..")
      if(NOT TorchLibs_ROOT AND hint)
        _torchlibs_version_header("${hint}${up}" header)
        if(header)
          get_filename_component(found_root "${hint}${up}" ABSOLUTE)
          set(TorchLibs_ROOT "${found_root}" CACHE PATH "" FORCE)
        endif()
      endif()
    endforeach()
  endforeach()
endif()

if(NOT TorchLibs_ROOT)
  if(Python_EXECUTABLE)
    set(_torchlibs_python "${Python_EXECUTABLE}")
  else()
    find_program(TorchLibs_PYTHON NAMES python3 python)
    mark_as_advanced(TorchLibs_PYTHON)
    set(_torchlibs_python "${TorchLibs_PYTHON}")
  endif()
  if(_torchlibs_python)
    # find_spec does not import torch: that would take seconds.
    execute_process(
      COMMAND "${_torchlibs_python}" -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE found_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(found_root)
      set(TorchLibs_ROOT "${found_root}" CACHE PATH "" FORCE)
    endif()
  endif()
endif()

_torchlibs_version_header("${TorchLibs_ROOT}" _torchlibs_header)
if(_torchlibs_header)
  # Another torch at the same place: configure again, and say so before any compile.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_torchlibs_header}")
  file(STRINGS "${_torchlibs_header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" TorchLibs_VERSION "${lines}")
  string(REPLACE ";" "." TorchLibs_VERSION "${TorchLibs_VERSION}")
endif()

# Which CUDA: wheel and archive both say it in the names of the libraries that c10_cuda needs.
set(TorchLibs_CUDA_MAJOR "")
if(EXISTS "${TorchLibs_ROOT}/lib/libc10_cuda.so")
  file(STRINGS "${TorchLibs_ROOT}/lib/libc10_cuda.so" needed REGEX "libcudart\\.so\\.[0-9]+" LIMIT_COUNT 1)
  string(REGEX MATCH "libcudart\\.so\\.([0-9]+)" _ "${needed}")
  set(TorchLibs_CUDA_MAJOR "${CMAKE_MATCH_1}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  TorchLibs
  REQUIRED_VARS TorchLibs_ROOT TorchLibs_VERSION
  VERSION_VAR TorchLibs_VERSION
  REASON_FAILURE_MESSAGE
    "AllFinite needs torch 2.9 or newer: install it (pip install torch) or pass -DTorchLibs_ROOT=/path/to/libtorch.")

function(_torchlibs_add name)
  if(TARGET torchlibs::${name})
    return()
  endif()
  add_library(torchlibs::${name} INTERFACE IMPORTED)
  target_include_directories(
    torchlibs::${name} SYSTEM
    INTERFACE "${TorchLibs_ROOT}/include" "${TorchLibs_ROOT}/include/torch/csrc/api/include")
  target_compile_features(torchlibs::${name} INTERFACE cxx_std_20)
  foreach(lib IN LISTS ARGN)
    target_link_libraries(torchlibs::${name} INTERFACE "${TorchLibs_ROOT}/lib/lib${lib}.so")
  endforeach()
endfunction()

if(TorchLibs_FOUND)
  _torchlibs_add(cpu torch_cpu c10)
  _torchlibs_add(python torch_python)
  if(TorchLibs_CUDA_MAJOR)
    _torchlibs_add(cuda c10_cuda)
    # No symbol asks for torch_cuda: its kernels register themselves when it loads. One word, or CMake tears it apart.
    target_link_libraries(
      torchlibs::cuda INTERFACE "-Wl,--push-state,--no-as-needed,${TorchLibs_ROOT}/lib/libtorch_cuda.so,--pop-state")
  endif()
endif()
