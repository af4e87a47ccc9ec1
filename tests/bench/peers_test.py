#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/peers.py where there is neither a GPU nor a package: its cases, its table, and what it does when a peer's process
says that the package is absent, fails at a case, dies at one or hangs. `peers_test.py PROGRAM Program`: whether
helix-bench-cuda knows every case."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "bench" / "peers.py"
sys.path.insert(0, str(ROOT / "bench"))

import peers  # noqa: E402
from peer_attention import Case, all_cases  # noqa: E402

PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
CASES = [Case(batch=batch) for batch in (1, 2, 3, 4)]


def run(*arguments, program=None):
    """Without site-packages: nothing but Python is installed."""
    options = ["--bench", program] if program else []
    return subprocess.run([sys.executable, "-B", "-S", SCRIPT, *options, *arguments], capture_output=True, text=True, timeout=120)


def fake_bench(folder, benchmarks):
    """A program that takes the switches of helix-bench-cuda and writes `benchmarks`; it keeps the filter and the
    cases that it is told beside it."""
    program = pathlib.Path(folder) / "bench"
    (pathlib.Path(folder) / "results.json").write_text(json.dumps({"benchmarks": benchmarks}), encoding="utf-8")
    program.write_text("""#!/bin/sh
here="$(dirname "$0")"
for argument in "$@"; do
  case "$argument" in
    --benchmark_filter=*) echo "${argument#*=}" > "$here/filter" ;;
    --case=*) echo "${argument#*=}" >> "$here/cases" ;;
    --benchmark_out=*) cp "$here/results.json" "${argument#*=}" ;;
  esac
done
""", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def measured(case, **counters):
    return {"name": case.name + "/iterations:1/manual_time", **counters}


# Replaces work_through() in a peer's process.
def absent(peer, cases, pipe):
    pipe.send({"absent": "ModuleNotFoundError: No module named 'x'"})


def dead_at_import(peer, cases, pipe):
    os._exit(11)


def faulty(peer, cases, pipe):
    """Fails at the second case, after which it ends as after a fault of a kernel, and dies at the third."""
    pipe.send({"version": "1", "device": "none"})
    for case in cases:
        if case.batch == 2:
            pipe.send({"error": "RuntimeError: an illegal memory access"})
            return
        if case.batch == 3:
            os._exit(9)
        pipe.send({"us": float(case.batch)})


def starts_once(peer, cases, pipe):
    """Dies at the second case, and again before it has said anything."""
    if cases[0].batch > 2:
        os._exit(7)
    pipe.send({"version": "1", "device": "none"})
    pipe.send({"us": float(cases[0].batch)})
    os._exit(9)


def silent(peer, cases, pipe):
    """Hangs at the second case."""
    pipe.send({"version": "1", "device": "none"})
    for case in cases:
        if case.batch == 2:
            time.sleep(1000)
        pipe.send({"us": float(case.batch)})


class CommandLine(unittest.TestCase):
    def test_help_needs_no_package(self):
        result = run("--help")
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in ("--only", "--json", "--list", "flashinfer", "flashattention3", "flashmla", "cudnn"):
            self.assertIn(word, result.stdout)

    def test_list_prints_every_case_once_and_needs_no_package(self):
        result = run("--list")
        self.assertEqual(result.returncode, 0, result.stderr)
        names = result.stdout.split()
        self.assertEqual(names, [case.name for case in all_cases()])
        self.assertEqual(len(names), len(set(names)))
        self.assertIn("partial_attention/heads:64:8/batch:64/tokens:131072/page:64/queries:1/kv:fp8_e4m3/ragged", names)
        self.assertEqual(sum("layout:latent" in name for name in names), 36)
        filtered = run("--list", "--filter", "heads:16:1/.*queries:2").stdout.split()
        self.assertEqual(len(filtered), 6)

    def test_every_name_is_that_of_its_case(self):
        for case in all_cases():
            self.assertEqual(Case.parse(case.name), case)
        self.assertEqual(Case.parse("heads:6:2/tokens:77"), Case(6, 2, tokens=77))

    def test_own_cases_stand_for_those_of_the_list(self):
        result = run("--list", "--case", "tokens:777/heads:6:2/dim:64", "--case=tokens:9/kv:fp8_e4m3/ragged")
        self.assertEqual(result.stdout.split(), ["partial_attention/heads:6:2/batch:1/tokens:777/page:64/queries:1/dim:64",
                                                 "partial_attention/heads:64:8/batch:1/tokens:9/page:64/queries:1/kv:fp8_e4m3/ragged"])

    def test_a_case_that_peers_do_not_have_is_refused(self):
        for name, why in (("tokens:9/page:16", "'page:16'"), ("heads:8:8", "has no tokens"), ("tokens:9/dim:576/value_dim:512", "layout"),
                          ("tokens:9/kv:f16", "'kv:f16'"), ("tokens:9/prompt:4", "'prompt:4'"),
                          ("tokens:9/queries:2/ragged", "more query tokens"), ("tokens:9/queries:10", "more query tokens"), ("tokens:-9", "'tokens:-9'"), ("tokens:9/layout:latent", "layout:latent")):
            result = run("--list", "--case", name)
            self.assertEqual(result.returncode, 2, name)
            self.assertIn(why, result.stderr)

    def test_an_unknown_peer_is_refused(self):
        result = run("--only", "xformers")
        self.assertEqual(result.returncode, 2)
        self.assertIn("flashinfer", result.stderr)


@unittest.skipUnless(PROGRAM, "run apart, with helix-bench-cuda")
class Program(unittest.TestCase):
    def test_helix_bench_cuda_has_every_case(self):
        listed = subprocess.run([PROGRAM, "--benchmark_list_tests", "--benchmark_filter=partial_attention"], capture_output=True,
                                text=True, timeout=120, check=True).stdout.split()
        # The filter used in a run must also select these cases and no others.
        pattern = peers.filter_of(all_cases())
        filtered = subprocess.run([PROGRAM, "--benchmark_list_tests", f"--benchmark_filter={pattern}"], capture_output=True, text=True,
                                  timeout=120, check=True).stdout.split()
        wanted = {case.name + "/iterations:1/manual_time" for case in all_cases()}
        self.assertEqual(wanted - set(listed), set())
        self.assertEqual(set(filtered), wanted)

    def test_helix_bench_cuda_has_own_cases_alone(self):
        cases = [Case(6, 2, 3, 777, 5, kv="fp8_e4m3", ragged=True), Case(16, 1, 1, 100, 2, 576, 512)]
        listed = subprocess.run([PROGRAM, "--benchmark_list_tests", *(f"--case={case.name}" for case in cases)], capture_output=True,
                                text=True, timeout=120, check=True).stdout.split()
        self.assertEqual(listed, [case.name + "/iterations:1/manual_time" for case in cases])


class Run(unittest.TestCase):
    def test_without_packages_the_table_has_helix_and_says_what_is_absent(self):
        first, second, third = (case for case in all_cases() if case.tokens == 8192 and case.kv == "bf16" and not case.is_latent)
        with tempfile.TemporaryDirectory() as folder:
            program = fake_bench(folder, [
                measured(first, us=15.5, **{"flop/s": 1e12, "bytes/s": 2.15e12}),
                measured(second, error_occurred=True, error_message="the result is wrong by 2")])
            out = pathlib.Path(folder) / "out.json"
            result = run("--filter", "heads:64:8/.*tokens:8192/page:64/queries:1$", "--json", out, program=program)
            self.assertEqual(result.returncode, 0, result.stderr)
            pattern = (pathlib.Path(folder) / "filter").read_text(encoding="utf-8").strip()
            rows = json.loads(out.read_text(encoding="utf-8"))
        lines = result.stdout.splitlines()
        self.assertRegex(lines[1], f"^{first.name} +15.50 +2150 GB/s$")
        self.assertRegex(lines[2], f"^{second.name} +- +-$")
        self.assertRegex(lines[3], f"^{third.name} +- +-$")
        self.assertIn(f"Helix: failed: the result is wrong by 2: {second.name}", lines)
        for peer in peers.PEERS:
            self.assertRegex(result.stdout, rf"(?m)^{peer}: not run: ModuleNotFoundError")
        self.assertRegex(pattern, rf"^\^\({first.name}\|{second.name}\|{third.name}\)/iterations:1/manual_time\$$")
        self.assertEqual([row["name"] for row in rows["cases"]], [first.name, second.name, third.name])
        self.assertEqual(rows["cases"][0]["helix"]["us"], 15.5)
        self.assertIsNone(rows["cases"][2]["helix"])
        self.assertEqual(set(rows["peers"]), set(peers.PEERS))

    def test_helix_bench_cuda_is_told_own_cases(self):
        case = Case(6, 2, tokens=777)
        with tempfile.TemporaryDirectory() as folder:
            program = fake_bench(folder, [measured(case, us=2.0, **{"flop/s": 1e12, "bytes/s": 1e12})])
            result = run("--case", "tokens:777/heads:6:2", "--only", "cudnn", program=program)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual((pathlib.Path(folder) / "cases").read_text(encoding="utf-8"), case.name + "\n")
            self.assertFalse((pathlib.Path(folder) / "filter").exists())
        self.assertRegex(result.stdout, f"(?m)^{case.name} +2.00 +1000 GB/s$")

    def test_without_helix_bench_cuda_it_says_so_and_fails(self):
        result = run("--only", "cudnn", "--filter", "queries:16", program="/nowhere/helix-bench-cuda")
        self.assertEqual(result.returncode, 1)
        self.assertIn("Helix is not measured", result.stderr)
        self.assertIn("cudnn: not run", result.stdout)
        self.assertNotIn("flashmla", result.stdout)


class Processes(unittest.TestCase):
    def test_an_absent_package_has_no_results(self):
        about, results = peers.run_peer("x", CASES, absent)
        self.assertIn("No module named", about["absent"])
        self.assertEqual(results, {})

    def test_a_package_that_kills_its_process_when_imported_is_absent(self):
        about, results = peers.run_peer("x", CASES, dead_at_import)
        self.assertIn("ended with 11", about["absent"])
        self.assertEqual(results, {})

    def test_a_case_that_fails_or_kills_the_process_costs_itself_alone(self):
        about, results = peers.run_peer("x", CASES, faulty)
        self.assertEqual(about["version"], "1")
        self.assertEqual([results[case.name] for case in CASES], [
            {"us": 1.0}, {"error": "RuntimeError: an illegal memory access"}, {"error": "its process ended with 9"}, {"us": 4.0}])

    def test_a_process_that_does_not_start_again_costs_what_it_had_not_done(self):
        about, results = peers.run_peer("x", CASES, starts_once)
        self.assertEqual(about["version"], "1")
        self.assertEqual([results[case.name] for case in CASES],
                         [{"us": 1.0}, {"error": "its process ended with 9"}] + 2 * [{"error": "its process ended with 7"}])

    def test_a_case_that_hangs_costs_itself_alone(self):
        _, results = peers.run_peer("x", CASES, silent, limit_s=3.0)
        self.assertEqual([results[case.name] for case in CASES],
                         [{"us": 1.0}, {"error": "no answer in 3 s"}, {"us": 3.0}, {"us": 4.0}])


if __name__ == "__main__":
    unittest.main()
