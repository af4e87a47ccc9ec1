# SPDX-License-Identifier: Apache-2.0
# Builds an engine that fetches helix as shared libraries, installs both, and runs a program that uses them. Without optimisation, because
# only linking and loading are tested.
include("${CMAKE_CURRENT_LIST_DIR}/build_consumer.cmake")
set(work "${WORK_DIR}/engine")
file(REMOVE_RECURSE "${work}/application" "${work}/staged" "${work}/moved")
helix_build_consumer("${CMAKE_CURRENT_LIST_DIR}/engine" "${work}/engine" "-DHELIX_SOURCE=${SOURCE_DIR}"
                     -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DCMAKE_INSTALL_LIBDIR=lib)
helix_run("${CMAKE_COMMAND}" --install "${work}/engine" --prefix "${work}/staged")
file(RENAME "${work}/staged" "${work}/moved")
if(NOT EXISTS "${work}/moved/share/doc/helix/LICENSE")
  message(FATAL_ERROR "helix's LICENSE is not in share/doc/helix, and may lie over the engine's")
endif()
helix_build_consumer("${CMAKE_CURRENT_LIST_DIR}/engine/application" "${work}/application" "-DCMAKE_PREFIX_PATH=${work}/moved"
                     -DCMAKE_BUILD_TYPE=Debug)
helix_run("${work}/application/application")
message("${output}")
