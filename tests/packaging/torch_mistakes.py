# SPDX-License-Identifier: Apache-2.0
"""What the operators of examples/torch refuse, and in which words: torch_mistakes.py LIBRARY, on two ranks under torchrun."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

SEQUENCES, HEADS, KV_HEADS, DIM, BLOCKS, BLOCK = 2, 4, 2, 8, 5, 4


def refused(name: str, words: str, call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError as error:
        if words in str(error):
            return True
        print(f'{name}: expected "{words}", got: {error}', file=sys.stderr)
        return False
    print(f'{name}: nothing was refused; expected "{words}"', file=sys.stderr)
    return False


def attention_is_careful() -> bool:
    right = {
        "q": torch.zeros(SEQUENCES, HEADS, DIM),
        "kv_cache": torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, DIM),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([8, 5]),
        "scale": 1.0,
    }
    torch.ops.helix.partial_attention(**right)
    mistakes = (
        ({"q": torch.zeros(SEQUENCES, HEADS * DIM)}, "q is [2, 32]; give 3 dimensions"),
        ({"q": torch.zeros(SEQUENCES, HEADS, DIM, dtype=torch.bfloat16)}, "q is of BFloat16; the CPU's activations are Float"),
        ({"q": torch.zeros(3, HEADS, DIM)}, "q has 3 tokens for 2 sequences; give as many of each sequence"),
        ({"q": torch.zeros(SEQUENCES, 3, DIM)}, "3 query heads do not divide into 2 KV heads"),
        ({"q": torch.zeros(SEQUENCES, HEADS, 2 * DIM)}, "head_dim of q is 16 and of the cache 8"),
        ({"kv_cache": torch.zeros(BLOCKS, BLOCK, KV_HEADS, DIM)}, "kv_cache is [5, 4, 2, 8]; give 5 dimensions"),
        ({"kv_cache": right["kv_cache"].transpose(0, 1)}, "dimension 0 must be 2: K, then V"),
        ({"block_first": True}, "dimension 1 must be 2: K, then V"),
        ({"kv_cache": right["kv_cache"].to(torch.int8)}, "kv_cache is of Char; give Float, Half, BFloat16 or Float8_e4m3fn"),
        ({"block_table": right["block_table"].long()}, "block_table is of Long; give Int"),
        ({"block_table": right["block_table"][:1]}, "block_table has 1 rows and seq_lens 2 sequences"),
        ({"block_table": right["block_table"] + 2}, "block_table[1][1] is 5; kv_cache has 5 blocks"),
        ({"seq_lens": torch.tensor([8, 9])}, "sequence 1 has 9 tokens on this rank; its row of block_table holds 2 blocks of 4"),
        ({"seq_lens": torch.tensor([8.0, 5.0])}, "seq_lens is of Float; give Long"),
        ({"scale": 0.0}, "scale is 0 (> 0)"),
        ({"kvp_size": 2, "kvp_rank": 2}, "kvp_rank is 2; give one in [0, 2)"),
    )
    attend = torch.ops.helix.partial_attention
    return all([refused("partial_attention", words, lambda: attend(**(right | wrong))) for wrong, words in mistakes])


def exchange_is_careful(group: dist.ProcessGroup) -> bool:
    ops, rank = torch.ops.helix, group.rank()
    new_group = torch.classes.helix.Group
    helix_group = new_group(group.group_name, rank, group.size(), SEQUENCES, 0)
    out, lse = torch.zeros(SEQUENCES, HEADS, DIM), torch.zeros(SEQUENCES, HEADS)
    position = torch.tensor([7, 4])
    many, many_lse = torch.zeros(SEQUENCES + 1, HEADS, DIM), torch.zeros(SEQUENCES + 1, HEADS)
    good = [
        refused("Group", "rank is 2 of 2", lambda: new_group("0", 2, 2, 1, 0)),
        refused("Group", "max_tokens is 0", lambda: new_group("0", 0, 2, 0, 0)),
        refused("exchange", "lse is of Double; give Float", lambda: ops.exchange(helix_group, out, lse.double())),
        refused("exchange", "lse [2, 3]; built for up to [2, 4, 8]", lambda: ops.exchange(helix_group, out, lse[:, :3])),
        refused("exchange", "out is [3, 4, 8]", lambda: ops.exchange(helix_group, many, many_lse)),
        refused("exchange", "3 query heads over KVP 2", lambda: ops.exchange(helix_group, out[:, :3], lse[:, :3])),
        refused("exchange", "positions is [1]", lambda: ops.exchange(helix_group, out, lse, position[:1])),
        refused("exchange", "positions is of Int; give Long", lambda: ops.exchange(helix_group, out, lse, position.int())),
        refused("combine", "partial_lse is [2, 4]; give 3 dimensions", lambda: ops.combine(out[None], lse)),
        refused("combine", "sink is [3]", lambda: ops.combine(out[None], lse[None], torch.zeros(3))),
    ]
    # Errors are detected before a message is sent, so the group still works, until a rank is in another step.
    ops.exchange(helix_group, out, lse, position)
    ops.exchange(helix_group, out, lse)
    good.append(
        refused(
            "exchange_combine",
            "a rank skipped or repeated a step",
            lambda: ops.exchange_combine(helix_group, out, lse, position + rank),
        )
    )
    return all(good)


def main() -> int:
    torch.ops.load_library(sys.argv[1])
    dist.init_process_group("gloo")
    try:
        return 0 if all([attention_is_careful(), exchange_is_careful(dist.group.WORLD)]) else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
