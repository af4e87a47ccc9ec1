# SPDX-License-Identifier: Apache-2.0
# Sets HELIX_HAS_CUDA and enables the CUDA language. HELIX_CUDA=AUTO uses CUDA if the machine has it, ON fails without it. NCCL and cuBLASLt
# are required parts.
set(HELIX_CUDA_MIN_VERSION 12.8)
set(HELIX_NCCL_MIN_VERSION 2.19)
set(HELIX_HAS_CUDA OFF)
if(HELIX_CUDA)
  include(CheckLanguage)
  # Forget a compiler that an earlier configuration did not find, because it may exist now.
  if(DEFINED CACHE{CMAKE_CUDA_COMPILER} AND NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
  check_language(CUDA)
  set(nvcc_version "")
  if(CMAKE_CUDA_COMPILER)
    # Check the version before the language is enabled: an nvcc that is too old does not know the architectures and would end the
    # configuration.
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
    string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" nvcc_version "${nvcc_version}")
    set(nvcc_version "${CMAKE_MATCH_1}")
  endif()
  find_package(CUDAToolkit QUIET)
  find_package(NCCL ${HELIX_NCCL_MIN_VERSION} QUIET)
  if(NOT CMAKE_CUDA_COMPILER)
    set(missing "there is no CUDA compiler; set CMAKE_CUDA_COMPILER")
  elseif(NOT nvcc_version VERSION_GREATER_EQUAL HELIX_CUDA_MIN_VERSION)
    set(missing "${CMAKE_CUDA_COMPILER} is no nvcc from ${HELIX_CUDA_MIN_VERSION} on (found \"${nvcc_version}\"); set CMAKE_CUDA_COMPILER")
  elseif(NOT TARGET CUDA::cudart_static OR NOT TARGET CUDA::cublasLt)
    set(missing "the CUDA toolkit has no static runtime or no cuBLASLt; set CUDAToolkit_ROOT")
  elseif(NOT NCCL_FOUND)
    set(missing "there is no NCCL from ${HELIX_NCCL_MIN_VERSION} on (${NCCL_LIBRARY}, version \"${NCCL_VERSION}\"); set NCCL_ROOT")
  else()
    set(HELIX_HAS_CUDA ON)
  endif()
  if(NOT HELIX_HAS_CUDA AND NOT HELIX_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "HELIX_CUDA is ${HELIX_CUDA}, but ${missing}, or HELIX_CUDA=OFF")
  endif()
endif()
if(HELIX_CUDA AND NOT HELIX_HAS_CUDA)
  message(STATUS "helix: CUDA OFF (HELIX_CUDA=AUTO): ${missing}")
else()
  message(STATUS "helix: CUDA ${HELIX_HAS_CUDA} (HELIX_CUDA=${HELIX_CUDA})")
endif()

# helix_check_cuda_architectures(ARCHITECTURES...): the kernels need compute capability 8.0, and those for 9.0 need 90a. For "native" the
# compiler decides.
function(helix_check_cuda_architectures)
  set(advice "set HELIX_CUDA_ARCHITECTURES, for helix alone, or CMAKE_CUDA_ARCHITECTURES, e.g. to \"80-virtual;90a-real\"")
  foreach(architecture IN LISTS ARGN)
    if(architecture MATCHES "^all")
      message(FATAL_ERROR "helix: CUDA architecture \"${architecture}\" takes in some below compute capability 8.0, which helix does "
                          "not support; ${advice}")
    elseif(architecture MATCHES "^([0-9]+)" AND CMAKE_MATCH_1 LESS 80)
      message(FATAL_ERROR "helix: CUDA architecture \"${architecture}\" is below compute capability 8.0, which helix needs; "
                          "${advice}")
    elseif(architecture MATCHES "^90(-|$)")
      message(FATAL_ERROR "helix: CUDA architecture \"${architecture}\" lacks the instructions of Hopper's kernels; build for 90a: "
                          "${advice}")
    endif()
  endforeach()
endfunction()

if(HELIX_HAS_CUDA)
  # Plain variables of this directory, so that a project that contains helix keeps its own. If they were unset, CMake would write its
  # default into the cache when the language is enabled.
  if(HELIX_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "${HELIX_CUDA_ARCHITECTURES}")
  elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT "$ENV{CUDAARCHS}" STREQUAL "")
    # The same as CMake does when it enables the language, but before the check. Later configurations may lack the environment variable.
    set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}" CACHE STRING "CUDA architectures")
  elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    # Native code for Hopper, and PTX that all other GPUs from compute capability 8.0 on compile at load time.
    set(CMAKE_CUDA_ARCHITECTURES "80-virtual;90a-real")
  endif()
  helix_check_cuda_architectures(${CMAKE_CUDA_ARCHITECTURES})
  # With a static runtime, CUDA is not needed at run time: a machine without a driver uses the CPU.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit ${HELIX_CUDA_MIN_VERSION} REQUIRED)
  # CMake before 3.25.2 does not know that nvcc 13 speaks C++20.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
endif()
