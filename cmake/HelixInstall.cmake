# SPDX-License-Identifier: Apache-2.0
# Installs the libraries, their headers, the package that find_package(helix) reads, and the files that pkg-config reads.
include(CMakePackageConfigHelpers)

set(HELIX_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/helix")

# helix_install(COMPONENT TARGET): each component has an export of its own, because a consumer that does not ask for it must not need its
# dependencies.
function(helix_install component target)
  set(export helix-${component}-targets)
  install(TARGETS ${target} EXPORT ${export}
          ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT helix
          LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT helix
          RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT helix)
  install(EXPORT ${export} NAMESPACE helix:: DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
  get_target_property(headers ${target} HELIX_HEADERS)
  foreach(header IN LISTS headers)
    if(header)  # get_target_property returns NOTFOUND for a target without headers
      get_filename_component(folder "helix/${header}" DIRECTORY)
      install(FILES "${PROJECT_SOURCE_DIR}/include/helix/${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/${folder}"
              COMPONENT helix)
    endif()
  endforeach()
endfunction()

helix_install(core helix_core)
helix_install(comm helix_comm)
helix_install(contract helix_contract)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/tests/contract/helix" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT helix)
helix_install(plan helix_plan)
if(HELIX_HAS_CPU)
  helix_install(cpu helix_cpu)
  helix_install(helix helix)
endif()
if(HELIX_HAS_MPI)
  helix_install(mpi helix_mpi)
endif()
if(HELIX_HAS_CUDA)
  helix_install(cuda helix_cuda)
  # NCCL has no CMake package, so the find module is installed too.
  install(FILES "${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake" DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
endif()

set(HELIX_IS_SHARED ${BUILD_SHARED_LIBS})
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/helix-config.cmake.in" "${PROJECT_BINARY_DIR}/helix-config.cmake"
                              INSTALL_DESTINATION "${HELIX_CMAKE_DIR}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/helix-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/helix-config.cmake" "${PROJECT_BINARY_DIR}/helix-config-version.cmake"
        DESTINATION "${HELIX_CMAKE_DIR}" COMPONENT helix)
if(PROJECT_IS_TOP_LEVEL)
  set(HELIX_DOC_DIR "${CMAKE_INSTALL_DOCDIR}")
else()  # a parent project owns CMAKE_INSTALL_DOCDIR and has a LICENSE of its own
  set(HELIX_DOC_DIR "${CMAKE_INSTALL_DATAROOTDIR}/doc/helix")
endif()
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${HELIX_DOC_DIR}" COMPONENT helix)

include(HelixPkgConfig)
