#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention of other packages beside helix-bench-cuda's, case by case, on one GPU in the same minutes.

Prints a line a case: Helix's us and rate, and each peer's us and in brackets its speed in units of Helix's (1.10: a tenth
faster). Of ragged cases only the speeds can be compared, as each program draws lengths of its own. Below stands what a
peer cannot do, what failed and why, and which packages are absent.

Timed as bench/cuda/partial_attention_bench.cpp times Helix: random KV in permuted pages, of which copies take turns so
that none is found in the L2 cache; up to 20 launches in a CUDA graph, replayed between two events, after a third of a
second of warming up; the median. Schedules that a package makes once a step are made outside of the timing (Helix's is
inside). The last query token of the first sequence is compared with f32 before.

peer_attention.py has the cases and how each package is called, and says for which versions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from peer_attention import PEERS, Case, Unsupported, Workload, all_cases

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 900  # per case, including kernels that a package compiles first


def one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def work_through(peer: str, cases: list[Case], pipe: Any) -> None:
    """What a peer's process does: says what it runs, or why it does not, then sends a result a case. Ends after a fault
    of a kernel, behind which CUDA does nothing more."""
    package, run = PEERS[peer]
    try:
        module = importlib.import_module(package)
        import torch

        pipe.send({"version": str(getattr(module, "__version__", "unknown")), "device": torch.cuda.get_device_name()})
    except Exception as error:
        pipe.send({"absent": one_line(error)})
        return
    for case in cases:
        try:
            work = Workload(case)
            us = run(work)
            result = {"us": us, "flop/s": work.flops / us * 1e6, "bytes/s": work.kv_bytes / us * 1e6}
        except Unsupported as error:
            result = {"unsupported": str(error)}
        except Exception as error:
            result = {"error": one_line(error)}
        work = None  # free it before the next pool
        pipe.send(result)
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:
            return


def next_message(receiver: Any, limit_s: float) -> dict[str, Any]:
    if not receiver.poll(limit_s):
        raise TimeoutError(f"no answer in {limit_s:g} s")
    return receiver.recv()


def run_peer(peer: str, cases: list[Case], worker: Callable[..., None] = work_through,
             limit_s: float = LIMIT_S) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """What the peer says of itself, and its results by case. A process that dies or hangs costs the case it was at."""
    context = multiprocessing.get_context("spawn")
    todo, results = list(cases), {}
    about: dict[str, str] = {}
    while todo:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(peer, todo, sender), daemon=True)
        process.start()
        sender.close()
        at_start = len(todo)
        said: dict[str, str] = {}
        why = ""
        try:
            said = next_message(receiver, limit_s)
            while todo and "absent" not in said:
                results[todo[0].name] = next_message(receiver, limit_s)
                print(f"{peer}: {todo.pop(0).name}", file=sys.stderr)
        except EOFError:
            process.join()
            if process.exitcode != 0 or len(todo) == at_start:
                why = f"its process ended with {process.exitcode}"
        except TimeoutError as error:
            process.kill()
            why = str(error)
        process.join()
        if not said or "absent" in said:
            why = why or said["absent"]
            if about:  # it ran before, so keep its results
                results |= {case.name: {"error": why} for case in todo}
            else:
                about = {"absent": why}
            break
        about = said
        if why:
            results[todo.pop(0).name] = {"error": why}
    return about or {"absent": "no case is asked for"}, results


def filter_of(cases: list[Case]) -> str:
    """The regular expression by which helix-bench-cuda finds these cases and no others."""
    return f"^({'|'.join(case.name for case in cases)})/iterations:1/manual_time$"


def run_helix(binary: pathlib.Path, cases: list[Case], are_own: bool) -> dict[str, dict[str, Any]]:
    """Counters by case of one run of helix-bench-cuda, over its cases or over those that it is told."""
    chosen = [f"--case={case.name}" for case in cases] if are_own else [f"--benchmark_filter={filter_of(cases)}"]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "helix.json"
        subprocess.run([binary, *chosen, f"--benchmark_out={out}", "--benchmark_out_format=json"], stdout=sys.stderr, check=True)
        measured = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    results = {}
    for case in measured:
        name = case["name"].removesuffix("/iterations:1/manual_time")
        if case.get("error_occurred"):
            results[name] = {"error": case.get("error_message", "")}
        else:
            results[name] = {key: case[key] for key in ("us", "flop/s", "bytes/s", "read_bytes/s") if key in case}
    return results


def print_table(cases: list[Case], helix: dict[str, dict[str, Any]], peers: dict[str, dict[str, dict[str, Any]]]) -> None:
    width = max((len(case.name) for case in cases), default=0)
    print(f"{'case':{width}}  {'Helix, us':>11}  {'rate':>12}" + "".join(f"  {peer:>18}" for peer in peers))
    for case in cases:
        ours = helix.get(case.name, {})
        line = f"{case.name:{width}}  {ours['us']:11.2f}" if "us" in ours else f"{case.name:{width}}  {'-':>11}"
        if "bytes/s" in ours:
            line += f"  {ours['bytes/s'] / 1e9:7.0f} GB/s"
        else:
            line += f"  {ours['flop/s'] / 1e12:5.0f} TFLOP/s" if "flop/s" in ours else f"  {'-':>12}"
        for results in peers.values():
            theirs = results.get(case.name, {})
            cell = f"{theirs['us']:.2f}" if "us" in theirs else "failed" if "error" in theirs else "-"
            if "us" in theirs and "flop/s" in ours:
                cell += f" ({theirs['flop/s'] / ours['flop/s']:.2f})"
            line += f"  {cell:>18}"
        print(line)


def print_reasons(name: str, results: dict[str, dict[str, Any]]) -> None:
    """Why cases have no figure, each reason once."""
    cases: dict[str, list[str]] = {}
    for case, result in results.items():
        why = f"failed: {result['error']}" if "error" in result else result.get("unsupported")
        if why:
            cases.setdefault(why, []).append(case)
    for why, names in cases.items():
        print(f"{name}: {why}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))


def default_binary() -> pathlib.Path:
    binaries = [ROOT / "build" / build / "bench" / "helix-bench-cuda" for build in ("cuda", "release")]
    return next((binary for binary in binaries if binary.exists()), binaries[0])


def case_named(name: str) -> Case:
    try:
        return Case.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the cases, run nothing; needs no package and no GPU")
    parser.add_argument("--only", action="append", choices=list(PEERS), metavar="NAME",
                        help=f"run this peer alone (repeatable): {', '.join(PEERS)}")
    parser.add_argument("--case", action="append", type=case_named, metavar="NAME",
                        help="time this case instead of the list's (repeatable), named like them, such as "
                             "heads:48:6/batch:3/tokens:50000/page:64/queries:1")
    parser.add_argument("--filter", default="", metavar="REGEX", help="cases whose name it finds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--bench", type=pathlib.Path, default=default_binary(), metavar="PROGRAM",
                        help="helix-bench-cuda, that of build/cuda or build/release unless given")
    options = parser.parse_args()
    cases = [case for case in options.case or all_cases() if re.search(options.filter, case.name)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    status = 0
    helix: dict[str, dict[str, Any]] = {}
    try:
        helix = run_helix(options.bench, cases, bool(options.case))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        why = f"{options.bench} ended with {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else one_line(error)
        print(f"peers.py: Helix is not measured: {why}", file=sys.stderr)
        status = 1
    about, peers = {}, {}
    for peer in options.only or PEERS:
        about[peer], results = run_peer(peer, cases)
        if "absent" not in about[peer]:
            peers[peer] = results
    print_table(cases, helix, peers)
    print_reasons("Helix", helix)
    for peer, said in about.items():
        if "absent" in said:
            print(f"{peer}: not run: {said['absent']}")
        else:
            print(f"{peer}: version {said['version']}")
            print_reasons(peer, peers[peer])
    if options.json:
        rows = [{"name": case.name, "helix": helix.get(case.name)}
                | {peer: results.get(case.name) for peer, results in peers.items()} for case in cases]
        options.json.write_text(json.dumps({"peers": about, "cases": rows}, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
