# SPDX-License-Identifier: Apache-2.0
# A project's own module, as there are many: no version, no target, no look for the CUDA toolkit. helix takes that of its own.
set(NCCL_FOUND TRUE)
