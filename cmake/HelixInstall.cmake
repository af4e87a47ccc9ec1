# SPDX-License-Identifier: Apache-2.0
# Installs the libraries, their headers and the package that find_package(helix) reads.
include(CMakePackageConfigHelpers)

set(HELIX_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/helix")

install(TARGETS helix EXPORT helix-targets ARCHIVE COMPONENT helix FILE_SET HEADERS COMPONENT helix)
install(EXPORT helix-targets NAMESPACE helix:: DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)

# An export of its own: a consumer who does not ask for the component needs no MPI.
if(TARGET helix_mpi)
  install(TARGETS helix_mpi EXPORT helix-mpi-targets ARCHIVE COMPONENT helix FILE_SET HEADERS COMPONENT helix)
  install(EXPORT helix-mpi-targets NAMESPACE helix:: DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
endif()

# Likewise without CUDA. NCCL has no package of its own, so how it is found is installed beside the export.
if(TARGET helix_cuda)
  install(TARGETS helix_cuda EXPORT helix-cuda-targets ARCHIVE COMPONENT helix FILE_SET HEADERS COMPONENT helix)
  install(EXPORT helix-cuda-targets NAMESPACE helix:: DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
  install(FILES "${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake" DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
endif()

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/helix-config.cmake.in" "${PROJECT_BINARY_DIR}/helix-config.cmake"
                              INSTALL_DESTINATION "${HELIX_CMAKE_DIR}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/helix-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/helix-config.cmake" "${PROJECT_BINARY_DIR}/helix-config-version.cmake"
        DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT helix)
