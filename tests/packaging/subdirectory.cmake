# SPDX-License-Identifier: Apache-2.0
# helix inside another project: it must not change that project, and its core must need no other package.
include("${CMAKE_CURRENT_LIST_DIR}/build_consumer.cmake")
set(work "${WORK_DIR}/subdirectory")
file(REMOVE_RECURSE "${work}")
set(guest "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/guest" ${helix_consumer_settings} "-DHELIX_SOURCE=${SOURCE_DIR}")
helix_run(${guest} -B "${work}/guest")
helix_expect_failure("HELIX_CUDA is maybe; set it to AUTO, ON or OFF" ${guest} -B "${work}/guest-maybe" -DHELIX_CUDA=maybe)
helix_build_consumer("${CMAKE_CURRENT_LIST_DIR}/core" "${work}/core" -DHOW=add_subdirectory "-DHELIX_SOURCE=${SOURCE_DIR}")
helix_run("${work}/core/core_consumer")
message("${output}")
if(CUDA_BUILT)
  foreach(architecture IN ITEMS 75 70-real all 90 90-virtual)
    helix_expect_failure("CUDA architecture \"${architecture}\"" ${guest} -B "${work}/guest-cuda"
                         "-DCMAKE_CUDA_COMPILER=${CUDA_COMPILER}" "-DWITH_CUDA_ARCHITECTURES=${architecture}")
  endforeach()
  helix_expect_failure("CUDA architecture \"75\"" "${CMAKE_COMMAND}" -E env CUDAARCHS=75 ${guest} -B "${work}/guest-cudaarchs"
                       "-DCMAKE_CUDA_COMPILER=${CUDA_COMPILER}" -DHELIX_CUDA=ON)
endif()
