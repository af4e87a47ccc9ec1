#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache that is split along the sequence over the ranks of torch.distributed, with the operators
of helix_torch.so, beside torch's own attention over the whole of it. Alone, or a rank a process under torchrun."""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Largest difference from attention in double precision. Outputs are means of numbers of magnitude 1.
LIMITS = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}
OPERATORS = ("partial_attention", "exchange", "combine", "exchange_combine")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=pathlib.Path, help="helix_torch.so, as CMake has built it")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch and the library have it")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: f32 on CPUs, bf16 on GPUs")
    parser.add_argument("--sequences", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the longest sequence (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--queries", type=int, default=1, help="query tokens of a sequence (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (default: %(default)s)")
    parser.add_argument("--interleave", type=int, default=16, help="tokens in a row of one rank (default: %(default)s)")
    parser.add_argument("--layout", choices=("NHD", "HND"), default="NHD", help="of a block (default: %(default)s)")
    parser.add_argument("--block-first", action="store_true", help="the cache is [blocks, 2, ...], not [2, blocks, ...]")
    parser.add_argument("--repeat", type=int, default=20, help="times that each operator is timed (default: %(default)s)")
    options = parser.parse_args()
    for name in ("sequences", "context", "heads", "kv_heads", "head_dim", "queries", "block_size", "interleave", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least 1")
    if options.heads % options.kv_heads:
        parser.error(f"--heads is {options.heads}, no multiple of --kv-heads {options.kv_heads}")
    if not options.library.is_file():
        parser.error(f"there is no {options.library}; build examples/torch first")
    return options


def choose_device(options: argparse.Namespace) -> torch.device:
    library_has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("helix::partial_attention", "CUDA")
    if options.device == "cuda" and not library_has_cuda:
        sys.exit(f"attention.py: {options.library} is built without CUDA; build it over a helix and a torch with CUDA")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("attention.py: torch sees no GPU; leave out --device cuda")
    if options.device == "cpu" or not (library_has_cuda and torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def connect(device: torch.device) -> dist.ProcessGroup:
    """The group of all ranks, whose NCCL communicator exists already."""
    # A process that dies while it holds NVLink multicast objects can leave the host's GPUs unusable, so this
    # one does not use them.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device_id)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    return dist.group.WORLD


def nccl_comm(group: dist.ProcessGroup, device: torch.device) -> int:
    """The ncclComm_t of the group's NCCL backend, which keeps it."""
    return group._get_backend(device)._comm_ptr() if device.type == "cuda" else 0


@dataclasses.dataclass
class Case:
    """One step: the same numbers on all ranks, of which each caches its own tokens."""

    q: torch.Tensor  # [sequences * queries, heads, D]
    k: list[torch.Tensor]  # per sequence [tokens, KV heads, D]
    v: list[torch.Tensor]
    kv_cache: torch.Tensor  # [2, blocks, block_size, KV heads, D], or [blocks, 2, ...]
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    owned: list[torch.Tensor]  # per sequence, the global positions that this rank caches


def make_case(options: argparse.Namespace, lengths: list[int], rank: int, size: int, device: torch.device) -> Case:
    dtype = DTYPES[options.dtype]
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    heads, dim, block = options.kv_heads, options.head_dim, options.block_size
    q = random(len(lengths) * options.queries, options.heads, dim)
    k = [random(length, heads, dim) for length in lengths]
    v = [random(length, heads, dim) for length in lengths]
    owned = []
    for length in lengths:
        positions = torch.arange(length)
        owned.append(positions[positions // options.interleave % size == rank].to(device))
    blocks = [-(-len(positions) // block) for positions in owned]
    # Blocks are in random order, one belongs to no sequence, and everything that is not cached is NaN, so
    # that reading it would show.
    order = torch.randperm(sum(blocks) + 1, generator=generator).to(torch.int32)
    block_table = torch.zeros(len(lengths), max(max(blocks), 1), dtype=torch.int32)
    shape = [sum(blocks) + 1, block, heads, dim] if options.layout == "NHD" else [sum(blocks) + 1, heads, block, dim]
    shape.insert(1 if options.block_first else 0, 2)
    kv_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
    if options.layout == "HND":
        kv_cache = kv_cache.transpose(2, 3)  # the shape stays vLLM's; in memory heads come before tokens
    begin = 0
    for b, positions in enumerate(owned):
        ids = order[begin : begin + blocks[b]]
        begin += blocks[b]
        block_table[b, : blocks[b]] = ids
        local = torch.arange(len(positions))
        page, slot = ids[local // block].long().to(device), (local % block).to(device)
        for half, values in enumerate((k[b], v[b])):
            kv_cache.select(1 if options.block_first else 0, half)[page, slot] = values[positions]
    return Case(q, k, v, kv_cache, block_table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), owned)


def definition(case: Case, queries: int, positions: list[torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps in double precision over the given positions of each sequence; None: over all."""
    outs, lses = [], []
    for b, (k, v) in enumerate(zip(case.k, case.v)):
        at = positions[b] if positions is not None else torch.arange(len(k), device=k.device)
        q = case.q[b * queries : (b + 1) * queries].double().transpose(0, 1)  # [heads, queries, D]
        group = q.shape[0] // k.shape[1]
        keys = k[at].double().transpose(0, 1).repeat_interleave(group, 0)
        values = v[at].double().transpose(0, 1).repeat_interleave(group, 0)
        last = torch.arange(len(k) - queries, len(k), device=k.device)
        visible = at[None, :] <= last[:, None]  # [queries, tokens]
        scores = (q @ keys.transpose(1, 2) * case.q.shape[2] ** -0.5).masked_fill(~visible, float("-inf"))
        lses.append(scores.logsumexp(2).transpose(0, 1))
        outs.append((scores.softmax(2).nan_to_num(0.0) @ values).transpose(0, 1))  # no visible token: 0
    return torch.cat(outs), torch.cat(lses)


class TorchAttention:
    """Torch's own attention over whole sequences of one length, from tensors that lie as it reads them."""

    def __init__(self, case: Case, queries: int) -> None:
        self._k, self._v = (torch.stack(x).transpose(1, 2).contiguous() for x in (case.k, case.v))
        q = case.q.unflatten(0, (len(case.k), queries)).transpose(1, 2)  # [sequences, heads, queries, D]
        if queries == 1:
            # Heads that share K and V are passed as queries of one head, because enable_gqa copies K and V
            # for each head on CPUs.
            self._q, self._options = q.reshape(len(case.k), self._k.shape[1], -1, q.shape[3]).contiguous(), {}
        else:
            tokens = torch.arange(self._k.shape[2], device=q.device)
            mask = tokens[None, :] <= tokens[-queries:, None]
            self._q, self._options = q.contiguous(), {"attn_mask": mask, "enable_gqa": True}
        self._tokens = case.q.shape

    def __call__(self) -> torch.Tensor:
        return scaled_dot_product_attention(self._q, self._k, self._v, **self._options)

    def tokens(self) -> torch.Tensor:
        """The result as the operators give theirs, [tokens, heads, D]."""
        out = self()
        return out.reshape(self._tokens) if not self._options else out.transpose(1, 2).reshape(self._tokens)


def difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one; infinities count if they do not stand in the same places, and NaN always."""
    if value.shape != expected.shape:
        raise AssertionError(f"got {tuple(value.shape)}, not {tuple(expected.shape)}")
    apart = torch.where(value.double() == expected.double(), 0.0, (value.double() - expected.double()).abs())
    return apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item() if apart.numel() else 0.0


def median_us(call: Callable[[], object], repeat: int, device: torch.device) -> float:
    """Of one call, by all ranks at once, to its end; on GPUs of ten in a row, as a step queues them."""
    row = 10 if device.type == "cuda" else 1
    times = []
    for _ in range(3 + repeat):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(row):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / row)
    return statistics.median(times[3:])


class Operators:
    """The operators of one rank over one case."""

    def __init__(self, options: argparse.Namespace, group: object, case: Case, rank: int, size: int) -> None:
        self._ops = torch.ops.helix
        self._group = group
        self._case = case
        self._attention = {"scale": options.head_dim**-0.5, "kvp_size": size, "kvp_rank": rank}
        self._attention |= {"interleave": options.interleave, "block_first": options.block_first}
        # The last positions of each sequence; the exchange uses them to detect a rank that is in another
        # step.
        first = case.seq_lens.long()[:, None] - options.queries
        self._positions = (first + torch.arange(options.queries, device=first.device)).flatten()

    def partial_attention(self) -> tuple[torch.Tensor, torch.Tensor]:
        case = self._case
        return self._ops.partial_attention(case.q, case.kv_cache, case.block_table, case.seq_lens, **self._attention)

    def exchange(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ops.exchange(self._group, out, lse, self._positions)

    def combine(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ops.combine(out, lse)

    def exchange_combine(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ops.exchange_combine(self._group, out, lse, self._positions)


def gathered_slices(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What the exchange is: this rank's slice of the heads, from every rank."""
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor)
    return torch.stack([part.chunk(size, 1)[rank] for part in parts])


def measure_errors(options: argparse.Namespace, operators: Operators, case: Case, rank: int, size: int) -> list[float]:
    """Of each operator, the larger one of its outputs and log-sum-exps."""
    partial = operators.partial_attention()
    expected_partial = definition(case, options.queries, case.owned)
    received = operators.exchange(*partial)
    expected_received = [gathered_slices(x, rank, size) for x in partial]
    expected = [x.chunk(size, 1)[rank] for x in definition(case, options.queries, None)]
    pairs = (
        (partial, expected_partial),
        (received, expected_received),
        (operators.combine(*received), expected),
        (operators.exchange_combine(*partial), expected),
    )
    return [max(difference(value, at) for value, at in zip(values, ats)) for values, ats in pairs]


def run(options: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> bool:
    rank, size = group.rank(), group.size()
    tokens = options.sequences * options.queries
    # Sequence lengths: the context, one token less, two less and so on; the last sequence is as short as
    # possible. Includes empty shards.
    lengths = [max(options.context - b, options.queries) for b in range(options.sequences)]
    lengths[-1] = min(options.queries, lengths[-1])
    helix_group = torch.classes.helix.Group(group.group_name, rank, size, tokens, nccl_comm(group, device))
    ragged = make_case(options, lengths, rank, size, device)
    errors = measure_errors(options, Operators(options, helix_group, ragged, rank, size), ragged, rank, size)

    case = make_case(options, [options.context] * options.sequences, rank, size, device)
    operators = Operators(options, helix_group, case, rank, size)
    errors = [max(pair) for pair in zip(errors, measure_errors(options, operators, case, rank, size))]
    partial = operators.partial_attention()
    received = operators.exchange(*partial)
    torch_attention = TorchAttention(case, options.queries)
    calls = (
        operators.partial_attention,
        lambda: operators.exchange(*partial),
        lambda: operators.combine(*received),
        lambda: operators.exchange_combine(*partial),
        lambda: operators.exchange_combine(*operators.partial_attention()),
        torch_attention,
    )
    own = difference(torch_attention.tokens(), definition(case, options.queries, None)[0])
    times = [median_us(call, options.repeat, device) for call in calls]
    helix_group.synchronize()  # throws if a rank was out of step
    table = torch.tensor([*errors, errors[-1], own, *times], dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    errors, times = table[: len(calls)].tolist(), table[len(calls) :].tolist()
    if rank == 0:
        print(
            f"{size} rank{'s' if size > 1 else ''} on {device.type}, {options.dtype}, {options.sequences} x {options.context} "
            f"tokens, {options.queries} queries each, {options.heads} heads over {options.kv_heads} of {options.head_dim}; "
            f"torch {torch.__version__}, {torch.get_num_threads()} threads a rank"
        )
        print(f"{'':38}{'largest error':>14}{'median us':>12}")
        names = (*OPERATORS, "partial_attention, exchange_combine", "torch's own, whole sequences on a rank")
        for name, error, elapsed in zip(names, errors, times):
            print(f"{name:38}{error:14.1e}{elapsed:12.1f}")
    limit = LIMITS[options.dtype]
    good = errors[OPERATORS.index("exchange")] == 0.0 and max(errors[: len(OPERATORS)]) <= limit
    if not good and rank == 0:
        print(f"attention.py: an error is above {limit:.0e}, or the exchange changed a value", file=sys.stderr)
    return good


def main() -> int:
    options = parse_arguments()
    torch.ops.load_library(options.library.resolve())
    device = choose_device(options)
    options.dtype = options.dtype or ("f32" if device.type == "cpu" else "bf16")
    if device.type == "cpu" and options.dtype != "f32":
        sys.exit(f"attention.py: --dtype is {options.dtype}; the CPU's operators take f32")
    if options.context < options.queries:
        sys.exit(f"attention.py: --context is {options.context}, below --queries {options.queries}")
    group = connect(device)
    try:
        if options.heads % group.size():
            sys.exit(f"attention.py: --heads is {options.heads}, no multiple of the {group.size()} ranks")
        return 0 if run(options, group, device) else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
