# Decides whether the CUDA half is built, and finds the toolkit behind nvcc, also where nvcc on the PATH is a wrapper.
#
# In: TorchLibs_CUDA_MAJOR. Out: ALLFINITE_CUDA (bool), ALLFINITE_CUDA_REASON (why not), ALLFINITE_NVCC (the real
# compiler), ALLFINITE_CUDA_INCLUDE_DIRS, ALLFINITE_CUDART, ALLFINITE_CUDA_TOOLKIT_MAJOR.

function(_allfinite_find_nvcc)
  # What the user names comes first, then the PATH, then the usual place.
  if(DEFINED ENV{CUDACXX})
    set(ALLFINITE_NVCC_ON_PATH "$ENV{CUDACXX}" CACHE FILEPATH "nvcc, or a wrapper of it")
  endif()
  find_program(ALLFINITE_NVCC_ON_PATH nvcc
               HINTS ENV CUDA_HOME ENV CUDA_PATH
               PATHS /usr/local/cuda
               PATH_SUFFIXES bin)
  mark_as_advanced(ALLFINITE_NVCC_ON_PATH)
  if(NOT ALLFINITE_NVCC_ON_PATH)
    return()
  endif()
  # A dry run prints the folders of the toolkit itself, whatever wrapper stands before it.
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/nvcc_probe.cu" "")
  execute_process(COMMAND "${ALLFINITE_NVCC_ON_PATH}" --dryrun -c "${CMAKE_CURRENT_BINARY_DIR}/nvcc_probe.cu" -o probe.o
                  ERROR_VARIABLE dryrun OUTPUT_QUIET)
  if(NOT dryrun MATCHES "#\\$ _HERE_=([^\n]+)")
    return()
  endif()
  set(bin "${CMAKE_MATCH_1}")
  string(REGEX MATCH "#\\$ TOP=([^\n]+)" _ "${dryrun}")
  get_filename_component(top "${CMAKE_MATCH_1}" ABSOLUTE)
  execute_process(COMMAND "${bin}/nvcc" --version OUTPUT_VARIABLE version)
  string(REGEX MATCH "release ([0-9]+)\\.([0-9]+)" _ "${version}")
  set(ALLFINITE_CUDA_TOOLKIT_MAJOR "${CMAKE_MATCH_1}" PARENT_SCOPE)
  set(ALLFINITE_CUDA_TOOLKIT_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}" PARENT_SCOPE)
  set(ALLFINITE_NVCC "${bin}/nvcc" PARENT_SCOPE)
  set(include_dirs "")
  foreach(dir "${top}/include" "${top}/targets/x86_64-linux/include" "${top}/targets/sbsa-linux/include")
    if(EXISTS "${dir}/cuda_fp16.h")
      list(APPEND include_dirs "${dir}")
    endif()
  endforeach()
  set(ALLFINITE_CUDA_INCLUDE_DIRS "${include_dirs}" PARENT_SCOPE)
  find_library(ALLFINITE_CUDART cudart PATHS "${top}" NO_DEFAULT_PATH
               PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib)
endfunction()

set(ALLFINITE_CUDA OFF)
set(ALLFINITE_CUDA_REASON "")
_allfinite_find_nvcc()
if(NOT TorchLibs_CUDA_MAJOR)
  set(ALLFINITE_CUDA_REASON "built against a CPU-only torch")
elseif(NOT ALLFINITE_NVCC)
  set(ALLFINITE_CUDA_REASON "built without nvcc")
elseif(NOT ALLFINITE_CUDA_INCLUDE_DIRS OR NOT ALLFINITE_CUDART)
  set(ALLFINITE_CUDA_REASON "built with an nvcc whose toolkit has no headers or no cudart library")
else()
  if(NOT ALLFINITE_CUDA_TOOLKIT_MAJOR STREQUAL TorchLibs_CUDA_MAJOR)
    message(FATAL_ERROR
      "AllFinite: nvcc is of CUDA ${ALLFINITE_CUDA_TOOLKIT_VERSION}, but torch ${TorchLibs_VERSION} is built for CUDA "
      "${TorchLibs_CUDA_MAJOR}; put an nvcc of CUDA ${TorchLibs_CUDA_MAJOR} first on the PATH, or leave the CUDA half out with "
      "-DALLFINITE_USE_CUDA=OFF (ALLFINITE_USE_CUDA=0 in the environment for pip).")
  endif()
  set(ALLFINITE_CUDA ON)
endif()
