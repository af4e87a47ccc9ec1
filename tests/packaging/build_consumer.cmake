# SPDX-License-Identifier: Apache-2.0
# helix_run: runs a command or fails with its output; helix_build_consumer: configures and builds a project.

function(helix_run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message("${output}")  # apart, since FATAL_ERROR reflows its text
    message(FATAL_ERROR "exit status ${status} of: ${command}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# helix_build_consumer(SOURCE BINARY [CMAKE_ARGUMENTS...])
function(helix_build_consumer source binary)
  # The settings of this build, and nothing of the environment that could hide a missing dependency.
  helix_run("${CMAKE_COMMAND}" -S "${source}" -B "${binary}" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}"
            "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}" "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF" ${ARGN})
  helix_run("${CMAKE_COMMAND}" --build "${binary}")
endfunction()
