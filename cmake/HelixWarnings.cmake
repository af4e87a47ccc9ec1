# SPDX-License-Identifier: Apache-2.0
# The warnings that every target of this project is built with, as errors at top level.
function(helix_set_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic)
  if(PROJECT_IS_TOP_LEVEL)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
