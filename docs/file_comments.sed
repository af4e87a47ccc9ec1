# SPDX-License-Identifier: Apache-2.0
# The comment that each header begins with, below its licence, is what doxygen says of the file. Lines keep their numbers.
1s|^// SPDX-.*|/// @file|
2,/^\(#pragma once\)\?$/s|^// |/// |
