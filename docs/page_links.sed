# SPDX-License-Identifier: Apache-2.0
# A page as doxygen gets it, which knows the other pages only: links into the sources and inside a page are left as their text.
s,\[\([^]]*\)\]([./]*\(examples\|include\|tests\|cuda/\|LICENSE\|#\)[^)]*),\1,g
