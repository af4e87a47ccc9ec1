# SPDX-License-Identifier: Apache-2.0
# Compiles SOURCE, which must fail. The compiler must print exactly one line with "error:", and that line must contain WORD.
#   cmake -DCXX=... -DINCLUDE_DIR=... -DSOURCE=... -DDEFINITION=... -DWORD=... [-DSTANDARD=c++20] -P one_error_line.cmake
if(NOT STANDARD)
  set(STANDARD c++20)
endif()
execute_process(COMMAND "${CXX}" -std=${STANDARD} -fsyntax-only -fdiagnostics-color=never "-I${INCLUDE_DIR}" "-D${DEFINITION}" "${SOURCE}"
                RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
# Brackets and semicolons are special in CMake's lists.
string(REGEX REPLACE "[][;]" "_" lines "${output}")
string(REGEX MATCHALL "[^\n]*error:[^\n]*" errors "${lines}")
list(LENGTH errors num_errors)
list(JOIN errors "\n" text)
string(REGEX REPLACE "[][;]" "_" word "${WORD}")
string(FIND "${text}" "${word}" found)
if(status EQUAL 0)
  message(FATAL_ERROR "${SOURCE} compiles, but must not")
endif()
if(NOT num_errors EQUAL 1 OR found EQUAL -1)
  message("${output}")
  message(FATAL_ERROR "expected one line with \"error:\" that contains \"${WORD}\" of ${CXX}, got ${num_errors}")
endif()
message("${text}")
