# SPDX-License-Identifier: Apache-2.0
# Installs the libraries, their headers and the package that find_package(helix) reads.
include(CMakePackageConfigHelpers)

set(HELIX_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/helix")

# helix_install(EXPORT TARGETS...): an export of its own, since a consumer who does not ask for a component needs nothing of it.
function(helix_install export)
  install(TARGETS ${ARGN} EXPORT ${export} ARCHIVE COMPONENT helix LIBRARY COMPONENT helix FILE_SET HEADERS COMPONENT helix)
  install(EXPORT ${export} NAMESPACE helix:: DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
endfunction()

helix_install(helix-targets helix helix_core helix_comm helix_cpu helix_plan)
if(TARGET helix_mpi)
  helix_install(helix-mpi-targets helix_mpi)
endif()
if(TARGET helix_cuda)
  helix_install(helix-cuda-targets helix_cuda)
  # NCCL has no package of its own, so how it is found is installed beside the export.
  install(FILES "${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake" DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
endif()

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/helix-config.cmake.in" "${PROJECT_BINARY_DIR}/helix-config.cmake"
                              INSTALL_DESTINATION "${HELIX_CMAKE_DIR}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/helix-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/helix-config.cmake" "${PROJECT_BINARY_DIR}/helix-config-version.cmake"
        DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT helix)
