# SPDX-License-Identifier: Apache-2.0
# helix_run runs a command or fails with its output; helix_expect_failure does the reverse. helix_configure_consumer and
# helix_build_consumer configure and build a project.

function(helix_run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message("${output}")  # printed separately, because FATAL_ERROR reflows its text
    message(FATAL_ERROR "exit status ${status} of: ${command}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# helix_expect_failure(WORDS COMMAND...): the command must fail and print WORDS, possibly broken over several lines.
function(helix_expect_failure words)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " flat "${output}")
  string(FIND "${flat}" "${words}" found)
  if(status EQUAL 0 OR found EQUAL -1)
    list(JOIN ARGN " " command)
    message("${output}")
    message(FATAL_ERROR "expected a failure that says \"${words}\", got exit status ${status} of: ${command}")
  endif()
endfunction()

# The settings of this build, but nothing from the environment that could hide a missing dependency.
set(helix_consumer_settings -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}"
    "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF")

# helix_build_consumer(SOURCE BINARY [CMAKE_ARGUMENTS...])
function(helix_build_consumer source binary)
  helix_run("${CMAKE_COMMAND}" -S "${source}" -B "${binary}" ${helix_consumer_settings} ${ARGN})
  helix_run("${CMAKE_COMMAND}" --build "${binary}")
endfunction()

# helix_build_core_consumers(BINARY HOW [CMAKE_ARGUMENTS...]): builds with each available compiler, in C++20 and C++23.
function(helix_build_core_consumers binary how)
  set(compilers "${CXX}")
  foreach(name IN ITEMS g++ clang++)
    find_program(helix_found_${name} ${name})
    get_filename_component(this "${CXX}" REALPATH)
    get_filename_component(other "${helix_found_${name}}" REALPATH)
    if(helix_found_${name} AND NOT this STREQUAL other)
      list(APPEND compilers "${helix_found_${name}}")
    endif()
  endforeach()
  foreach(compiler IN LISTS compilers)
    foreach(standard IN ITEMS 20 23)
      string(MAKE_C_IDENTIFIER "${compiler}_${standard}" name)
      helix_build_consumer("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/core" "${binary}/${name}" "-DCMAKE_CXX_COMPILER=${compiler}"
                           -DHOW=${how} -DSTANDARD=${standard} ${ARGN})
      helix_run("${binary}/${name}/core_consumer")
      message("${compiler}, ${how}: ${output}")
    endforeach()
  endforeach()
endfunction()
