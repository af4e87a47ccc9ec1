# SPDX-License-Identifier: Apache-2.0
# Installs helix-core.pc, one file for each library, and helix.pc for all of the CPU libraries. They contain no paths of this machine except
# those of MPI, CUDA and NCCL, and derive their prefix from their own location.
set(HELIX_PKGCONFIG_DIR "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(helix_pc_prefix "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH helix_pc_prefix "/${HELIX_PKGCONFIG_DIR}" "/")
  string(REGEX REPLACE "/$" "" helix_pc_prefix "${helix_pc_prefix}")
  set(helix_pc_prefix "\${pcfiledir}/${helix_pc_prefix}")
endif()
foreach(part IN ITEMS LIB INCLUDE)
  string(TOLOWER "${part}" name)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${part}DIR}")
    set(helix_pc_${name}dir "${CMAKE_INSTALL_${part}DIR}")
  else()
    set(helix_pc_${name}dir "\${prefix}/${CMAKE_INSTALL_${part}DIR}")
  endif()
endforeach()

# helix_pkg_config(NAME DESCRIPTION [REQUIRES packages...] [LIBS flags...] [HIDDEN_REQUIRES packages...] [HIDDEN_LIBS flags...] [CFLAGS
# flags...]): hidden dependencies are inside a shared library, but are part of every link with a static one. A static helix does not list
# them as private: it can only be linked statically, so pkg-config need not be called with --static.
function(helix_pkg_config name description)
  cmake_parse_arguments(arg "" "" "REQUIRES;LIBS;HIDDEN_REQUIRES;HIDDEN_LIBS;CFLAGS" ${ARGN})
  if(NOT BUILD_SHARED_LIBS)
    list(APPEND arg_REQUIRES ${arg_HIDDEN_REQUIRES})
    list(APPEND arg_LIBS ${arg_HIDDEN_LIBS})
  endif()
  set(text "prefix=${helix_pc_prefix}\nlibdir=${helix_pc_libdir}\nincludedir=${helix_pc_includedir}\n\n")
  string(APPEND text "Name: ${name}\nDescription: ${description}\nVersion: ${PROJECT_VERSION}\n")
  list(TRANSFORM arg_REQUIRES REPLACE "^(helix.*)$" "\\1 = ${PROJECT_VERSION}")
  list(JOIN arg_REQUIRES ", " requires)
  list(JOIN arg_LIBS " " libs)
  list(JOIN arg_CFLAGS " " cflags)
  if(requires)
    string(APPEND text "Requires: ${requires}\n")
  endif()
  if(libs)
    string(APPEND text "Libs: -L\${libdir} ${libs}\n")
  endif()
  if(cflags)
    string(APPEND text "Cflags: ${cflags}\n")
  endif()
  file(WRITE "${PROJECT_BINARY_DIR}/pkgconfig/${name}.pc" "${text}")
  install(FILES "${PROJECT_BINARY_DIR}/pkgconfig/${name}.pc" DESTINATION "${HELIX_PKGCONFIG_DIR}" COMPONENT helix)
endfunction()

helix_pkg_config(helix-core "Helix Parallelism: the headers that stand above every machine (C++20, nothing to link)"
                 CFLAGS "-I\${includedir}")
helix_pkg_config(helix-comm "Helix Parallelism: how ranks find each other" REQUIRES helix-core LIBS -lhelix_comm -pthread)
helix_pkg_config(helix-plan "Helix Parallelism: the planner" REQUIRES helix-core LIBS -lhelix_plan)
if(HELIX_HAS_CPU)
  helix_pkg_config(helix-cpu "Helix Parallelism: the backend on host threads" REQUIRES helix-comm LIBS -lhelix_cpu
                   HIDDEN_REQUIRES libhwy)
  helix_pkg_config(helix "Helix Parallelism on the CPU" REQUIRES helix-cpu helix-plan)
endif()
if(HELIX_HAS_MPI)
  list(TRANSFORM MPI_CXX_INCLUDE_DIRS PREPEND "-I" OUTPUT_VARIABLE helix_pc_mpi_cflags)
  helix_pkg_config(helix-mpi "Helix Parallelism: ranks as MPI processes" REQUIRES helix-cpu LIBS -lhelix_mpi ${MPI_CXX_LIBRARIES}
                   CFLAGS ${helix_pc_mpi_cflags})
endif()
if(HELIX_HAS_CUDA)
  get_filename_component(helix_pc_nccl_dir "${NCCL_LIBRARY}" DIRECTORY)
  get_filename_component(helix_pc_nccl_name "${NCCL_LIBRARY}" NAME)
  helix_pkg_config(helix-cuda "Helix Parallelism: the backend on NVIDIA GPUs" REQUIRES helix-comm LIBS -lhelix_cuda
                   HIDDEN_LIBS "-L${CUDAToolkit_LIBRARY_DIR}" -lcudart_static -lcublasLt "-L${helix_pc_nccl_dir}"
                               "-l:${helix_pc_nccl_name}" -ldl -lrt)
endif()
