# SPDX-License-Identifier: Apache-2.0
"""The cases of peers.py, a case's data on a GPU, and how each package is called.

Written for FlashMLA 9241ae3, FlashAttention-3 0251105 (hopper/), FlashInfer 0.7.2 and cuDNN by PyTorch 2.11. Importing this
file needs none of them.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

PAGE = 64  # tokens
COLD_BYTES = 2 << 30  # ideally this much KV is read between two reads of the same page
MOST_LAUNCHES = 20  # per graph
REPLAY_US = 20e3
DEVICE = "cuda"


class Unsupported(Exception):
    """What a package has no operation for."""


@dataclass(frozen=True)
class Case:
    """As AttentionCase of bench/attention_case.hpp, whose names these are; its fields alone that peers have."""

    heads: int = 64
    kv_heads: int = 8
    batch: int = 1
    tokens: int = 8192  # per sequence, including the query tokens; the maximum if ragged
    queries: int = 1
    dim: int = 128
    value_dim: int = 128
    kv: str = "bf16"
    ragged: bool = False

    @property
    def is_latent(self) -> bool:
        return self.dim != self.value_dim

    @property
    def name(self) -> str:
        name = f"partial_attention/heads:{self.heads}:{self.kv_heads}/batch:{self.batch}/tokens:{self.tokens}"
        name += f"/page:{PAGE}/queries:{self.queries}"
        name += f"/dim:{self.dim}" if self.dim != 128 else ""
        name += f"/value_dim:{self.value_dim}" if self.is_latent else ""
        name += f"/kv:{self.kv}" if self.kv != "bf16" else ""
        name += "/ragged" if self.ragged else ""
        return name + ("/layout:latent" if self.is_latent else "")

    @classmethod
    def parse(cls, name: str) -> Case:
        """The case of this name, as AttentionCase::parse() reads it. Raises ValueError for what no peer has."""
        sizes = {"batch": "batch", "tokens": "tokens", "queries": "queries", "dim": "dim", "value_dim": "value_dim"}
        fields: dict[str, Any] = {}
        for part in name.removeprefix("partial_attention/").split("/"):
            key, _, value = part.partition(":")
            if key == "heads" and re.fullmatch(r"\d+:\d+", value):
                fields["heads"], fields["kv_heads"] = map(int, value.split(":"))
            elif key in sizes and value.isdecimal():
                fields[sizes[key]] = int(value)
            elif part in ("kv:bf16", "kv:fp8_e4m3"):
                fields["kv"] = value
            elif part == "ragged":
                fields["ragged"] = True
            elif part not in (f"page:{PAGE}", "layout:latent"):
                raise ValueError(f"'{part}' is nothing that the peers' cases have; they are those of --list, of other sizes")
        fields.setdefault("value_dim", fields.get("dim", cls.dim))
        case = cls(**fields)
        if "tokens" not in fields:
            raise ValueError(f"'{name}' has no tokens")
        if case.queries > (1 if case.ragged else case.tokens):
            raise ValueError(f"'{name}' has more query tokens than a sequence may have tokens; ragged cases have one here")
        if case.is_latent != ("layout:latent" in name.split("/")):
            raise ValueError(f"'{name}': layout:latent and a value_dim other than dim come together here")
        return case

    @property
    def token_elements(self) -> int:
        return self.dim if self.is_latent else 2 * self.kv_heads * self.dim


def all_cases() -> list[Case]:
    cases = []
    for kv in ("bf16", "fp8_e4m3"):
        cases += [Case(batch=b, tokens=s, kv=kv) for s in (8192, 131072) for b in (1, 8, 64)]
        cases.append(Case(batch=64, tokens=131072, kv=kv, ragged=True))
    cases += [Case(heads, 1, b, s, queries, 576, 512) for heads in (128, 64, 16) for b in (1, 8, 64)
              for s in (8192, 131072) for queries in (1, 2)]
    cases += [Case(batch=8, tokens=131072, queries=queries) for queries in (4, 8, 16)]
    for heads in (32, 64):
        cases += [Case(heads, tokens=after + chunk, queries=chunk)
                  for chunk, after in ((4096, 0), (4096, 28672), (512, 32768))]
        cases += [Case(heads, tokens=after + 4096, queries=4096, dim=64, value_dim=64) for after in (0, 28672)]
    return cases


class Workload:
    """A case on the GPU: queries, one pool of random KV, and pages in random order for as many copies of the batch as
    launches take in turn. The pool has no layout: a peer views it in its own."""

    def __init__(self, case: Case) -> None:
        import torch

        self.torch, self.case = torch, case
        self.lengths = [random.randint(1, case.tokens) if case.ragged else case.tokens for _ in range(case.batch)]
        counts = [-(-length // PAGE) for length in self.lengths]
        dtype = torch.bfloat16 if case.kv == "bf16" else torch.float8_e4m3fn
        self.kv_bytes = sum(self.lengths) * case.token_elements * dtype.itemsize
        self.turns = min(1 + COLD_BYTES // self.kv_bytes, MOST_LAUNCHES)
        self.pages = torch.randperm(self.turns * sum(counts), device=DEVICE).int().view(self.turns, -1)
        self.tables = torch.zeros(self.turns, case.batch, max(counts), dtype=torch.int32, device=DEVICE)
        starts = [sum(counts[:b]) for b in range(case.batch + 1)]
        for b, count in enumerate(counts):
            self.tables[:, b, :count] = self.pages[:, starts[b]:starts[b + 1]]
        self.page_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.seqlens = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        self.pool = torch.empty(self.pages.numel() * PAGE * case.token_elements, dtype=dtype, device=DEVICE)
        for part in self.pool.split(1 << 28):
            part.copy_(self._uniform(part.numel()))
        self.q = self._uniform(case.batch * case.queries, case.heads, case.dim)
        self.scale = 4.0 / math.sqrt(case.dim)

    def _uniform(self, *shape: int) -> Any:
        return self.torch.empty(shape, dtype=self.torch.bfloat16, device=DEVICE).uniform_(-1.0, 1.0)

    @property
    def flops(self) -> float:
        """Operations of both products over the visible pairs of query and token."""
        queries = self.case.queries
        pairs = sum(queries * (length - queries) + queries * (queries + 1) // 2 for length in self.lengths)
        return 2.0 * pairs * self.case.heads * (self.case.dim + self.case.value_dim)

    def first(self, pages: Any) -> Any:
        """[tokens, heads, D] in f32 of the first sequence, from [pages, PAGE, heads, D]."""
        ids = self.tables[0, 0, :-(-self.lengths[0] // PAGE)].long()
        if pages.element_size() == 1:  # indexing of bytes works everywhere
            rows = pages.view(self.torch.uint8)[ids].view(pages.dtype)
        else:
            rows = pages[ids]
        return rows.flatten(0, 1)[:self.lengths[0]].float()

    def check(self, out: Any, k: Any, v: Any, tolerance: float) -> None:
        """Compares the last query token of the first sequence, whose keys and values are `k` and `v`, in f32."""
        torch, case = self.torch, self.case
        q = self.q[case.queries - 1].float().view(case.kv_heads, -1, case.dim)
        weights = torch.softmax(torch.einsum("hgd,shd->hgs", q, k) * self.scale, -1)
        right = torch.einsum("hgs,shd->hgd", weights, v).flatten(0, 1)
        got = out.reshape(-1, case.heads, case.value_dim)[case.queries - 1].float()
        error = (torch.linalg.norm(got - right) / torch.linalg.norm(right)).item()
        if not error < tolerance:
            raise ValueError(f"the result is wrong by {error:.2g}")

    def time(self, queue: Callable[[int], Any], k: Any, v: Any, tolerance: float = 1e-2) -> float:
        """us of one `queue(turn)`, which returns the output, once its result is found right."""
        torch = self.torch
        self.check(queue(0), k, v, tolerance)
        start = time.monotonic()
        while time.monotonic() - start < 0.3:
            for turn in range(self.turns):  # all turns, for plans and lazy loading
                queue(turn)
            torch.cuda.synchronize()
        us = self._replay(queue, 1, 3)
        launches = max(1, min(int(REPLAY_US / us), self.turns))
        return self._replay(queue, launches, 5 if us > 2 * REPLAY_US else 15)

    def _replay(self, queue: Callable[[int], Any], launches: int, repeats: int) -> float:
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(launches):
                queue(turn)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(repeats + 1):
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / launches)
        return statistics.median(times[1:])


def flashmla(work: Workload) -> float:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    case = work.case
    if not case.is_latent:
        raise Unsupported("decodes latents only")
    pages = work.pool.view(-1, PAGE, 1, case.dim)
    q = work.q.view(case.batch, case.queries, case.heads, case.dim)
    schedule, _ = get_mla_metadata()  # the first call fills it
    k = work.first(pages)
    return work.time(lambda turn: flash_mla_with_kvcache(
        q, pages, work.tables[turn], work.seqlens, case.value_dim, schedule, softmax_scale=work.scale,
        causal=case.queries > 1)[0], k, k[..., :case.value_dim])


def flashattention3(work: Workload) -> float:
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    case = work.case
    q = work.q.view(case.batch, case.queries, case.heads, case.dim)
    options: dict[str, Any] = {}
    if case.is_latent:  # 64 rotary columns, and as `qv` the columns that are values too
        pages = work.pool.view(-1, PAGE, 1, case.dim)
        k, v = pages[..., case.value_dim:], pages[..., :case.value_dim]
        options["qv"] = q[..., :case.value_dim]
        q, right_k = q[..., case.value_dim:], work.first(pages)
    else:
        k, v = work.pool.view(2, -1, PAGE, case.kv_heads, case.dim)
        right_k = work.first(k)
    if case.kv == "fp8_e4m3":  # queries are fp8 too
        q = q.to(k.dtype)
        one = work.torch.ones(case.batch, case.kv_heads, device=DEVICE)
        options.update(q_descale=one, k_descale=one, v_descale=one)
    options["scheduler_metadata"] = get_scheduler_metadata(
        case.batch, case.queries, work.tables.shape[-1] * PAGE, case.heads, case.kv_heads, q.shape[-1], work.seqlens,
        qkv_dtype=q.dtype, headdim_v=v.shape[-1], page_size=PAGE, causal=True)
    return work.time(lambda turn: flash_attn_with_kvcache(
        q, k, v, cache_seqlens=work.seqlens, page_table=work.tables[turn], softmax_scale=work.scale, causal=True,
        return_softmax_lse=True, **options)[0], right_k, work.first(v), 1e-2 if case.kv == "bf16" else 0.1)


def flashinfer(work: Workload) -> float:
    import flashinfer as package

    torch, case = work.torch, work.case
    space = torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)
    query_starts = torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * case.queries
    last_page = (work.seqlens - 1) % PAGE + 1
    shape = (case.heads, case.kv_heads, case.dim, PAGE)
    dtypes = {"q_data_type": work.q.dtype, "kv_data_type": work.pool.dtype, "sm_scale": work.scale}
    runs = []
    for pages in work.pages:
        if case.is_latent:
            kv = work.pool.view(-1, PAGE, case.dim)
            wrapper = package.mla.BatchMLAPagedAttentionWrapper(space)
            wrapper.plan(qo_indptr=query_starts, kv_indptr=work.page_starts, kv_indices=pages, kv_len_arr=work.seqlens,
                         num_heads=case.heads, head_dim_ckv=case.value_dim, head_dim_kpe=case.dim - case.value_dim,
                         page_size=PAGE, causal=case.queries > 1, **dtypes)
            runs.append(partial(wrapper.run, q_nope=work.q[..., :case.value_dim], q_pe=work.q[..., case.value_dim:],
                                ckv_cache=kv[..., :case.value_dim], kpe_cache=kv[..., case.value_dim:], return_lse=True))
            continue
        kv = work.pool.view(-1, 2, case.kv_heads, PAGE, case.dim)
        if case.queries == 1:
            wrapper = package.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
            wrapper.plan(work.page_starts, pages, last_page, *shape, **dtypes)
        else:
            wrapper = package.BatchPrefillWithPagedKVCacheWrapper(space, "HND")
            wrapper.plan(query_starts, work.page_starts, pages, last_page, *shape, causal=True, **dtypes)
        runs.append(partial(wrapper.run, work.q, kv, return_lse=True))
    if case.is_latent:
        k = work.first(kv.unsqueeze(2))
        v = k[..., :case.value_dim]
    else:
        k, v = (work.first(kv[:, i].transpose(1, 2)) for i in (0, 1))
    return work.time(lambda turn: runs[turn]()[0], k, v)


def cudnn(work: Workload) -> float:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = work.case
    if case.is_latent or case.ragged or case.kv != "bf16":
        raise Unsupported("by PyTorch: contiguous K and V of bf16 and of one length only")
    if 1 < case.queries < case.tokens:
        raise Unsupported("by PyTorch: no causal mask behind a context")
    kv = work.pool.view(2, work.turns, case.batch, case.kv_heads, case.tokens, case.dim)
    q = work.q.view(case.batch, case.queries, case.heads, case.dim).transpose(1, 2)

    def queue(turn: int) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return work.torch.nn.functional.scaled_dot_product_attention(
                q, kv[0, turn], kv[1, turn], is_causal=case.queries > 1, scale=work.scale, enable_gqa=True).transpose(1, 2)

    return work.time(queue, *(kv[i, 0, 0].transpose(0, 1).float() for i in (0, 1)))


# For each name, the imported module and the function that returns microseconds or raises.
PEERS: dict[str, tuple[str, Callable[[Workload], float]]] = {
    "flashinfer": ("flashinfer", flashinfer),
    "flashattention3": ("flash_attn_interface", flashattention3),
    "flashmla": ("flash_mla", flashmla),
    "cudnn": ("torch", cudnn),
}
