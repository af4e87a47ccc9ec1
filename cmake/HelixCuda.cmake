# SPDX-License-Identifier: Apache-2.0
# Sets HELIX_HAS_CUDA and makes the CUDA language ready: HELIX_CUDA=AUTO takes what the machine has, ON fails without it. NCCL is
# part of it.
set(HELIX_HAS_CUDA OFF)
if(HELIX_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  find_package(NCCL 2.19 QUIET)
  if(CMAKE_CUDA_COMPILER AND NCCL_FOUND)
    set(HELIX_HAS_CUDA ON)
  elseif(NOT HELIX_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "HELIX_CUDA is ${HELIX_CUDA}, but there is no CUDA compiler (${CMAKE_CUDA_COMPILER}) or no NCCL (${NCCL_LIBRARY}); set "
                        "CMAKE_CUDA_COMPILER and NCCL_ROOT, or HELIX_CUDA=OFF")
  endif()
endif()
message(STATUS "helix: CUDA ${HELIX_HAS_CUDA} (HELIX_CUDA=${HELIX_CUDA})")

if(HELIX_HAS_CUDA)
  # Hopper's own code, and PTX that newer and older GPUs from compute capability 8.0 on compile when they load it.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80-virtual;90a-real" CACHE STRING "GPUs to compile for")
  endif()
  # A static runtime needs no CUDA at run time: a machine without a driver uses the CPU.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit 12.8 REQUIRED)
  # CMake before 3.25.2 does not know that nvcc 13 speaks C++20.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
endif()
