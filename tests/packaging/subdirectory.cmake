# SPDX-License-Identifier: Apache-2.0
# Builds helix inside another project and runs that project's program. Without optimisation: only the wiring is in question.
include("${CMAKE_CURRENT_LIST_DIR}/build_consumer.cmake")
set(work "${WORK_DIR}/subdirectory_consumer")
helix_build_consumer("${CMAKE_CURRENT_LIST_DIR}/subdirectory" "${work}" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0)
helix_run("${work}/consumer")
message("${output}")
# A machine without CUDA is no reason to fail.
helix_run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/subdirectory" -B "${work}-without-cuda" -G "${GENERATOR}"
          "-DCMAKE_CXX_COMPILER=${CXX}" -DCMAKE_CUDA_COMPILER=CMAKE_CUDA_COMPILER-NOTFOUND -DNO_CUDA=ON)
