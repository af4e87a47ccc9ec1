# SPDX-License-Identifier: Apache-2.0
# Sets the warnings of every target of this project, as errors if HELIX_WERROR is on, and the sanitizers, if any.
function(helix_set_warnings target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic>)
  # No -Wpedantic: nvcc hands the host compiler line directives in GCC's style.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  if(HELIX_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
                                             $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
endfunction()

# Sanitizers apply to whole programs, so they are set for the directory tree and not for a target.
set(HELIX_SANITIZE "" CACHE STRING "Sanitizers to build everything with: address,undefined or undefined or thread; empty is none")
if(HELIX_SANITIZE)
  add_compile_options(-fsanitize=${HELIX_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${HELIX_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Instrumentation hides initialisations from the flow analysis, which then warns about correct code.
    add_compile_options(-Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-array-bounds)
  endif()
endif()
