# SPDX-License-Identifier: Apache-2.0
# Checks every C++ and CUDA source against .clang-format, with the version that formatted the sources.
set(version 14)  # other versions lay out some constructs differently
find_program(clang_format NAMES clang-format-${version} clang-format)
if(NOT clang_format)
  message("SKIPPED: clang-format is not installed")
  return()
endif()
execute_process(COMMAND "${clang_format}" --version OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT found MATCHES "version ${version}\\.")
  message("SKIPPED: the sources are formatted with clang-format ${version}; this is ${found}")
  return()
endif()

set(sources "")
foreach(folder IN ITEMS include src cuda examples tests bench)
  file(GLOB_RECURSE found_sources "${SOURCE_DIR}/${folder}/*.hpp" "${SOURCE_DIR}/${folder}/*.cpp"
                                  "${SOURCE_DIR}/${folder}/*.cu" "${SOURCE_DIR}/${folder}/*.cuh")
  list(APPEND sources ${found_sources})
endforeach()
execute_process(COMMAND "${clang_format}" --dry-run -Werror ${sources} WORKING_DIRECTORY "${SOURCE_DIR}"
                RESULT_VARIABLE status ERROR_VARIABLE output)
if(NOT status EQUAL 0)
  string(REGEX MATCHALL "[^\n]*: error: code should be clang-formatted[^\n]*" complaints "${output}")
  list(TRANSFORM complaints REPLACE ":[0-9]+:[0-9]+: error:.*" "")
  list(REMOVE_DUPLICATES complaints)
  list(JOIN complaints "\n  " files)
  message(FATAL_ERROR "not formatted; run clang-format -i on:\n  ${files}")
endif()
