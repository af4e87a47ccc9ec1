# SPDX-License-Identifier: Apache-2.0
# Installs the package, moves it, and builds and runs examples/consumer and the component checks against it.
include("${CMAKE_CURRENT_LIST_DIR}/build_consumer.cmake")
set(work "${WORK_DIR}/installed_package")
file(REMOVE_RECURSE "${work}")
helix_run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${work}/staged")
# Packages are built in one place and used in another: nothing may remember the first.
file(RENAME "${work}/staged" "${work}/moved")

file(GLOB_RECURSE public_headers RELATIVE "${SOURCE_DIR}/include" "${SOURCE_DIR}/include/*.hpp")
file(GLOB_RECURSE installed_headers RELATIVE "${work}/moved/include" "${work}/moved/include/*.hpp")
if(NOT MPI_BUILT)
  list(REMOVE_ITEM public_headers helix/cpu/mpi_comm.hpp)
endif()
if(NOT CUDA_BUILT)
  list(FILTER public_headers EXCLUDE REGEX "^helix/cuda/")
endif()
set(not_installed ${public_headers})
list(REMOVE_ITEM not_installed ${installed_headers})
if(not_installed)
  message(FATAL_ERROR "public headers that are not installed; add them to a file set in src/ or cuda/CMakeLists.txt: "
                      "${not_installed}")
endif()

helix_build_consumer("${SOURCE_DIR}/examples/consumer" "${work}/consumer" -DCMAKE_BUILD_TYPE=Debug
                     "-DCMAKE_PREFIX_PATH=${work}/moved")
helix_run("${work}/consumer/consumer")
message("${output}")
helix_build_consumer("${CMAKE_CURRENT_LIST_DIR}/components" "${work}/components" "-DCMAKE_PREFIX_PATH=${work}/moved"
                     "-DEXPECT_CUDA=${CUDA_BUILT}" "-DEXPECT_MPI=${MPI_BUILT}")
if(CUDA_BUILT)
  helix_run("${work}/components/components_cuda")
  message("${output}")
endif()
