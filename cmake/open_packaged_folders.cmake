# SPDX-License-Identifier: Apache-2.0
# cpack runs this before it packs the installed files: gives everybody access to the folders. CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
# does not achieve this if the umask of the packaging user denies others access.
file(CHMOD_RECURSE "${CPACK_TEMPORARY_DIRECTORY}" DIRECTORY_PERMISSIONS
     OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
