# SPDX-License-Identifier: Apache-2.0
include(CMakeFindDependencyMacro)
find_dependency(helix COMPONENTS cpu)
include("${CMAKE_CURRENT_LIST_DIR}/engine-targets.cmake")
