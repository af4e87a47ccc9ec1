# SPDX-License-Identifier: Apache-2.0
# A project's own module, like many others: it sets no version and no target and does not look for the CUDA toolkit. helix must use its own
# module.
set(NCCL_FOUND TRUE)
