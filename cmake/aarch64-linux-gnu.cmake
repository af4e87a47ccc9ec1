# SPDX-License-Identifier: Apache-2.0
# Toolchain file: cross-compiles on Debian for 64-bit Arm and runs the tests in an emulator. Libraries come from build/arm64/sysroot, which
# cmake/arm64_sysroot.sh fills, and never from the machine's own folders.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

get_filename_component(HELIX_SYSROOT "${CMAKE_CURRENT_LIST_DIR}/../build/arm64/sysroot" ABSOLUTE)
set(CMAKE_FIND_ROOT_PATH "${HELIX_SYSROOT}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

set(CMAKE_CROSSCOMPILING_EMULATOR "${CMAKE_CURRENT_LIST_DIR}/emulate_arm64.sh")
