# SPDX-License-Identifier: Apache-2.0
# The packages that cpack builds from the install rules: libhelix-dev_VERSION_ARCHITECTURE.deb and helix-VERSION-SYSTEM.tar.gz. Each
# contains the headers, the libraries of this build (static or shared, see BUILD_SHARED_LIBS), and the files for find_package and
# pkg-config.
#   cmake --build BUILD && cpack --config BUILD/CPackConfig.cmake -B FOLDER
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME helix)
set(CPACK_PACKAGE_VENDOR "Helix")
set(CPACK_PACKAGE_CONTACT "the authors of Helix" CACHE STRING "Maintainer that packages name")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}, C++ library")
set(CPACK_PACKAGE_DESCRIPTION
    "Helix Parallelism splits the KV cache of long sequences over ranks, along the sequence, for decoding with very long contexts.
This package has the headers, the libraries, and the files that find_package(helix) and pkg-config read.")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGE_FILE_NAME "helix-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR}")
set(CPACK_STRIP_FILES OFF)  # users link static libraries and need their symbols
set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/cmake/open_packaged_folders.cmake")

set(CPACK_DEBIAN_PACKAGE_NAME libhelix-dev)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
if(CMAKE_CROSSCOMPILING)  # otherwise CPack asks dpkg for this machine's architecture
  string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" processor)
  set(debian_x86_64 amd64)
  set(debian_aarch64 arm64)
  set(debian_ppc64le ppc64el)
  if(DEFINED debian_${processor})
    set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE ${debian_${processor}})
  else()
    set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE ${processor})
  endif()
endif()

# The Debian package that owns an installed file; empty if none does, as for a library built from source.
function(helix_debian_package_of file result)
  set(package "")
  find_program(HELIX_DPKG_QUERY dpkg-query)
  mark_as_advanced(HELIX_DPKG_QUERY)
  if(HELIX_DPKG_QUERY AND EXISTS "${file}")
    execute_process(COMMAND "${HELIX_DPKG_QUERY}" -S "${file}" OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE status)
    if(status EQUAL 0 AND output MATCHES "^([a-z0-9.+-]+)")
      set(package "${CMAKE_MATCH_1}")
    endif()
  endif()
  set(${result} "${package}" PARENT_SCOPE)
endfunction()

# Packages that a user compiles and links against. dpkg-shlibdeps finds what a shared library needs at run time. A static library is linked
# by its users, against the Highway version that it was compiled with.
set(needed "")
set(useful "")
if(HELIX_HAS_CPU AND NOT BUILD_SHARED_LIBS)
  get_target_property(hwy_include hwy::hwy INTERFACE_INCLUDE_DIRECTORIES)
  list(GET hwy_include 0 hwy_include)
  helix_debian_package_of("${hwy_include}/hwy/highway.h" package)
  if(package)
    list(APPEND needed "${package} (>= ${hwy_VERSION})")
  endif()
endif()
if(HELIX_HAS_MPI)
  # There are none if the compiler is MPI's own, such as mpicxx.
  set(mpi_include_dirs ${MPI_CXX_INCLUDE_DIRS})
  if(NOT mpi_include_dirs)
    set(mpi_include_dirs ${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES})
  endif()
  find_file(mpi_header mpi.h PATHS ${mpi_include_dirs} NO_DEFAULT_PATH NO_CACHE)
  helix_debian_package_of("${mpi_header}" package)
  if(NOT package)  # the file may be a link of the alternatives system
    get_filename_component(mpi_header "${mpi_header}" REALPATH)
    helix_debian_package_of("${mpi_header}" package)
  endif()
  if(package)
    list(APPEND useful ${package})  # only the component mpi needs it
  endif()
endif()
list(JOIN needed ", " CPACK_DEBIAN_PACKAGE_DEPENDS)
list(JOIN useful ", " CPACK_DEBIAN_PACKAGE_RECOMMENDS)
if(BUILD_SHARED_LIBS)
  find_program(HELIX_DPKG_SHLIBDEPS dpkg-shlibdeps)
  mark_as_advanced(HELIX_DPKG_SHLIBDEPS)
  if(HELIX_DPKG_SHLIBDEPS)
    set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
    set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${PROJECT_BINARY_DIR}/src" "${PROJECT_BINARY_DIR}/cuda")
  endif()
endif()

include(CPack)
