# SPDX-License-Identifier: Apache-2.0
# Compiles a file that includes only one public header, or the file SOURCE that uses them, with the strictest warnings and each available
# compiler. A project that adds helix as a subdirectory may use these flags itself.
if(HEADER MATCHES "mpi" AND NOT HAS_MPI)
  message("SKIPPED: ${HEADER} needs MPI, which was not found")
  return()
endif()
string(REPLACE "," ";" mpi_options "${MPI_INCLUDE_OPTIONS}")
if(NOT HEADER MATCHES "mpi")
  set(mpi_options "")
endif()

if(SOURCE)
  set(source "${SOURCE}")
else()
  string(MAKE_C_IDENTIFIER "${HEADER}" name)
  set(source "${WORK_DIR}/${name}.cpp")
  # Included twice, to detect a missing include guard.
  file(WRITE "${source}" "#include <${HEADER}>\n#include <${HEADER}>\n")
endif()

set(compilers "${CXX}")
set(other g++)
if(CXX_ID STREQUAL "GNU")
  set(other clang++)
endif()
find_program(found_other ${other})
if(found_other)
  list(APPEND compilers "${found_other}")
endif()
foreach(compiler IN LISTS compilers)
  execute_process(
    COMMAND "${compiler}" -std=c++20 -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wmissing-field-initializers -Werror
            -fsyntax-only "-I${INCLUDE_DIR}" ${mpi_options} "${source}"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message("${output}")  # printed separately, because SEND_ERROR reflows its text
    message(SEND_ERROR "${HEADER}${SOURCE} does not compile alone with ${compiler}")
  endif()
endforeach()
