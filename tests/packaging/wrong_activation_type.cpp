// SPDX-License-Identifier: Apache-2.0
// Must not compile: arguments of one activation type for a backend of another. The error is one line that
// names it.
#include <helix/cpu/backend.hpp>
#include <helix/lse_combine.hpp>

void combine(helix::cpu::Backend<helix::cpu::LocalComm>& backend,
             const helix::LseCombineArgs<helix::bf16>& args, helix::cpu::Stream stream) {
  helix::lse_combine(backend, args, stream);
}
