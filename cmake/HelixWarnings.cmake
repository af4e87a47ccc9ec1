# SPDX-License-Identifier: Apache-2.0
# The warnings that every target of this project is built with, as errors at top level; and the sanitizers, if any.
function(helix_set_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic)
  if(PROJECT_IS_TOP_LEVEL)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

# Sanitizers act on whole programs, so they are set for the directory tree and not a target.
set(HELIX_SANITIZE "" CACHE STRING "Sanitizers to build everything with: address,undefined or undefined or thread; empty is none")
if(HELIX_SANITIZE)
  add_compile_options(-fsanitize=${HELIX_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${HELIX_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    add_compile_options(-Wno-pass-failed)  # loops that are only unrolled at full optimisation
  else()
    # Instrumentation hides initialisations from the flow analysis: false alarms in code that is clean without it.
    add_compile_options(-Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-array-bounds)
  endif()
  # Sanitized SIMD kernels take minutes to compile for all of Highway's instruction sets and with unrolled loops (515 s of
  # clang++ for attention_kernels.cpp); for AVX2 alone and rolled up, half a minute.
  add_compile_definitions(HELIX_UNROLL=)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_compile_options(-march=x86-64-v3 -maes -mpclmul)
    add_compile_definitions(HWY_COMPILE_ONLY_STATIC)
  endif()
endif()
