# SPDX-License-Identifier: Apache-2.0
# Runs chat_test.py with the Python of build/chat, which ./test.sh and ./run.sh create.
if(NOT EXISTS "${PYTHON}")
  message("SKIPPED: there is no ${PYTHON}; examples/chat/set_up.sh makes it where Python and PyPI are")
  return()
endif()
execute_process(COMMAND "${PYTHON}" -B "${SOURCE_DIR}/tests/chat/chat_test.py" "${DECODER}" "${SOURCE_DIR}/tests/data"
                RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "chat_test.py ended with ${status}")
endif()
