# SPDX-License-Identifier: Apache-2.0
# Run by cpack before it packs what it has installed: lets everybody into the folders. CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS does not,
# where the umask of who makes the package keeps others out.
file(CHMOD_RECURSE "${CPACK_TEMPORARY_DIRECTORY}" DIRECTORY_PERMISSIONS
     OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
