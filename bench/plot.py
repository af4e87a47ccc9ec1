#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of what helix-bench-cuda measured.

plot.py RESULTS.json ...          draws docs/images/*.svg (needs matplotlib); a case in several files counts as in the last
plot.py --table RESULTS.json ...  prints a line a case instead; fails if a case failed
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Figures must depend only on the results.
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def load(paths):
    """Cases by name, in the order of the files, and the context of the last file."""
    cases, context = {}, {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            results = json.load(file)
        context = results.get("context", {})
        for case in results["benchmarks"]:
            if case.get("run_type", "iteration") == "iteration":
                cases[case_name(case)] = case
    return cases, context


def case_name(case):
    """The name without what the harness appends."""
    return case["name"].removesuffix("/manual_time").removesuffix("/iterations:1")


def parameters(name):
    """{"kvp": "4", ...} of decode_layer/kvp:4/..."""
    return dict(part.split(":", 1) for part in name.split("/") if ":" in part)


def print_table(cases):
    """Returns whether every case succeeded."""
    width = max((len(name) for name in cases), default=0)
    print(f"{'case':{width}}  {'us':>11}  {'GB/s':>7}  {'of read':>7}")
    succeeded = True
    for name, case in cases.items():
        if case.get("error_occurred"):
            print(f"{name:{width}}  FAILED: {case.get('error_message', '')}")
            succeeded = False
            continue
        line = f"{name:{width}}  {case.get('us', case['real_time']):11.2f}"
        line += f"  {case['bytes/s'] / 1e9:7.0f}" if "bytes/s" in case else " " * 9
        line += f"  {case['%_of_read']:6.1f}%" if "%_of_read" in case else " " * 9
        if name.startswith("partial_attention/") and "flop/s" in case:
            line += f"  {case['flop/s'] / 1e12:5.0f} TFLOP/s"
        if "floor_us" in case:
            line += f"  {case['ratio']:.3f} of the floor, host {case['host_us']:.0f} us"
        elif "ratio_aim" in case:
            line += f"  {case['ratio']:.3f} of one GPU ({case['ratio_with_exchange']:.3f} with exchange), aim {case['ratio_aim']:.2f}"
        elif "all_to_all_us" in case:
            line += f"  all-to-all alone {case['all_to_all_us']:.2f} us"
        print(line)
    return succeeded


def plot_roofline(plt, cases, device, path):
    """Share of the measured read ceiling of attention over bf16 pools in Helix's own layout, head size 128. Returns whether
    there was such a case."""
    bars = {}
    for name, case in cases.items():
        if name.startswith("partial_attention/") and "%_of_read" in case and not case.get("error_occurred"):
            at = parameters(name)
            if name.endswith("/portable") or {"dim", "kv", "layout"} & at.keys():
                continue
            label = f"{at['heads']} heads, batch {at['batch']}, {int(at['tokens']) // 1024}K, page {at['page']}"
            if at["queries"] != "1":
                label += f", {at['queries']} queries"
            if "/ragged" in name:
                label += ", ragged"
            bars[label] = case
    if not bars:
        return False
    figure, axes = plt.subplots(figsize=(8, 0.7 + 0.34 * len(bars)), layout="constrained")
    shares = [case["%_of_read"] for case in bars.values()]
    axes.barh(list(bars), shares, color="#4c72b0")
    for row, (share, case) in enumerate(zip(shares, bars.values())):
        axes.text(max(100, share) + 1, row, f"{share:.0f} %, {case['bytes/s'] / 1e9:.0f} GB/s", va="center", fontsize=8)
    axes.axvline(100, color="black", linewidth=0.8, zorder=0)
    axes.set_xlim(0, 1.25 * max(100, *shares))
    axes.invert_yaxis()
    axes.set_xlabel("% of a read of the same memory in the same run")
    axes.set_title(f"Partial attention in bf16, {device}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata=NO_METADATA)
    plt.close(figure)
    return True


def plot_scaling(plt, cases, device, path):
    """Time of a layer by topology at batch 8, the best HOP-B setting of each. Returns whether there was a case."""
    best = {}
    for name, case in cases.items():
        if not name.startswith("decode_layer/") or "us_per_layer" not in case or case.get("error_occurred"):
            continue
        at = parameters(name)
        if at["batch"] != "8":
            continue
        key = (int(at["kvp"]) * int(at["tpa"]), int(at["tpa"]), int(at["kvp"]))
        if key not in best or case["us_per_layer"] < best[key][0]["us_per_layer"]:
            best[key] = case, at
    if not best:
        return False
    order = sorted(best)
    labels = [f"{size} GPU{'s' if size > 1 else ''}\nKVP {kvp} x TPA {tpa}\nHOP-B {best[size, tpa, kvp][1]['hop_b']}"
              for size, tpa, kvp in order]
    times = [best[key][0]["us_per_layer"] / 1e3 for key in order]
    floors = [best[key][0]["floor_us"] / best[key][0]["layers"] / 1e3 for key in order]
    figure, axes = plt.subplots(figsize=(1.6 + 1.2 * len(order), 4), layout="constrained")
    drawn = axes.bar(labels, times, width=0.6, color="#4c72b0", label="measured")
    axes.bar_label(drawn, [f"{time:.2f}" for time in times], padding=2, fontsize=8)
    axes.hlines(floors, [i - 0.3 for i in range(len(order))], [i + 0.3 for i in range(len(order))], color="#c44e52",
                label="reads and collectives, one after the other")
    axes.set_ylabel("ms a layer and token")
    contexts = sorted({int(case["context"]) for case, _ in best.values()})
    shown = " or ".join(f"{context // 1024}K" for context in contexts)
    axes.set_title(f"Decode step, Llama 405B layers, batch 8, {shown} tokens, {device}", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata=NO_METADATA)
    plt.close(figure)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=pathlib.Path)
    parser.add_argument("--table", action="store_true", help="print a line a case, draw nothing")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "images", help="folder of the figures")
    options = parser.parse_args()
    cases, context = load(options.results)
    if options.table:
        return 0 if print_table(cases) else 1

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "helix"  # equal results give equal files
    from matplotlib import pyplot as plt

    device = context.get("device", "GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    figures = {"partial_attention_roofline.svg": plot_roofline, "decode_scaling.svg": plot_scaling}
    for file, plot in figures.items():
        path = options.out / file
        if plot(plt, cases, device, path):
            print(f"wrote {path}")
        else:
            print(f"no case for {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
