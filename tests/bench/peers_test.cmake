# SPDX-License-Identifier: Apache-2.0
# Runs peers_test.py with python3. PROGRAM: helix-bench-cuda, or nothing.
find_program(python python3)
if(NOT python)
  message("SKIPPED: there is no python3")
  return()
endif()
execute_process(COMMAND "${python}" -B "${CMAKE_CURRENT_LIST_DIR}/peers_test.py" ${PROGRAM} RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "peers_test.py ended with ${status}")
endif()
