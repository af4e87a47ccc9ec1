# SPDX-License-Identifier: Apache-2.0
# Settings that all library targets of this project share.

# helix_set_include_directory(TARGET SCOPE): adds include/ in this project, and the install location of the headers.
function(helix_set_include_directory target scope)
  target_include_directories(${target} ${scope} "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>")
  if(HELIX_INSTALL)
    target_include_directories(${target} ${scope} "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  endif()
endfunction()

# helix_add_library(NAME SOURCES...): the target helix_NAME, with the alias helix::NAME here and in the installed package. Static or shared,
# see BUILD_SHARED_LIBS. Only symbols marked HELIX_API are visible.
function(helix_add_library name)
  set(target helix_${name})
  add_library(${target} ${ARGN})
  add_library(helix::${name} ALIAS ${target})
  helix_set_include_directory(${target} PUBLIC)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")
  set_target_properties(${target} PROPERTIES
    EXPORT_NAME ${name}
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    INSTALL_RPATH "$<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>"  # lets the libraries find each other wherever the package lies
    INSTALL_RPATH_USE_LINK_PATH ON  # also for libraries outside the system folders, such as the CUDA toolkit
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})  # before 1.0 a minor version may break the interface
  helix_set_warnings(${target})
  # Compilation takes minutes, so a project that contains helix builds this target only if it links it.
  if(NOT PROJECT_IS_TOP_LEVEL AND NOT HELIX_INSTALL)
    set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()

# helix_link_hidden(TARGET LIBRARIES...): links libraries that no public header uses. A shared library contains them, so users of the
# installed one need not find them. Users of a static library link them themselves.
function(helix_link_hidden target)
  get_target_property(type ${target} TYPE)
  foreach(library IN LISTS ARGN)
    if(type STREQUAL "SHARED_LIBRARY")
      target_link_libraries(${target} PRIVATE "$<BUILD_INTERFACE:${library}>")
    else()
      target_link_libraries(${target} PRIVATE ${library})
    endif()
  endforeach()
endfunction()

# helix_add_headers(TARGET HEADERS...): public headers, named relative to include/helix/, that are installed with the target. File sets are
# not used because they need CMake 3.23. packaging/installed_package fails if a header is in no list.
function(helix_add_headers target)
  set_property(TARGET ${target} APPEND PROPERTY HELIX_HEADERS ${ARGN})
endfunction()
