# SPDX-License-Identifier: Apache-2.0
# What every library target of this project has in common.

# helix_add_library(NAME SOURCES...): the target helix_NAME, known as helix::NAME here and where it is installed. Static or shared as
# BUILD_SHARED_LIBS says; nothing is visible but what HELIX_API marks.
function(helix_add_library name)
  set(target helix_${name})
  add_library(${target} ${ARGN})
  add_library(helix::${name} ALIAS ${target})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")
  set_target_properties(${target} PROPERTIES
    EXPORT_NAME ${name}
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})  # before 1.0 a minor version may break the interface
  helix_set_warnings(${target})
endfunction()

# helix_add_headers(TARGET HEADERS...): public headers, named below include/helix/. packaging/installed_package fails if one is missing.
function(helix_add_headers target)
  list(TRANSFORM ARGN PREPEND "${PROJECT_SOURCE_DIR}/include/helix/" OUTPUT_VARIABLE headers)
  get_target_property(type ${target} TYPE)
  set(scope PUBLIC)
  if(type STREQUAL "INTERFACE_LIBRARY")
    set(scope INTERFACE)
  endif()
  target_sources(${target} ${scope} FILE_SET HEADERS BASE_DIRS "${PROJECT_SOURCE_DIR}/include" FILES ${headers})
endfunction()
