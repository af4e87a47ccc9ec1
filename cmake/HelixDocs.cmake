# SPDX-License-Identifier: Apache-2.0
# The target `docs` builds the reference of the public headers and the pages of docs/ into docs/html of the build folder.
find_program(HELIX_DOXYGEN doxygen)
mark_as_advanced(HELIX_DOXYGEN)
if(HELIX_DOXYGEN)
  add_custom_target(docs
    COMMAND ${CMAKE_COMMAND} -E make_directory "${PROJECT_BINARY_DIR}/docs"
    COMMAND ${CMAKE_COMMAND} -E env "HELIX_DOCS_OUTPUT=${PROJECT_BINARY_DIR}/docs" "HELIX_DOCS_VERSION=${PROJECT_VERSION}"
            "${HELIX_DOXYGEN}" docs/Doxyfile
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
    COMMENT "Writing ${PROJECT_BINARY_DIR}/docs/html/index.html"
    VERBATIM)
endif()
