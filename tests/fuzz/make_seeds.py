#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the fuzz corpora from tests/data and bench/results: make_seeds.py OUTPUT makes a folder a target in OUTPUT."""
import argparse
import json
import pathlib
import struct

data = pathlib.Path(__file__).resolve().parent.parent / "data"
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", type=pathlib.Path)
output = parser.parse_args().output
for target in ("safetensors", "model_config", "generation_config", "weight_map", "token_lists", "request", "commands", "hardware", "bench_results"):
    (output / target).mkdir(parents=True, exist_ok=True)
for config in sorted(data.glob("*/config.json")):
    (output / "model_config" / config.parent.name).write_bytes(config.read_bytes())
for config in sorted(data.glob("*/generation_config.json")):
    (output / "generation_config" / config.parent.name).write_bytes(config.read_bytes())
sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1, "eos_token_id": [1, 2]}
(output / "generation_config" / "sampled").write_text(json.dumps(sampled))
for file in sorted(data.glob("*/model.safetensors")):
    raw = file.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    # The target takes the file size from the first 8 bytes, so that the corpus need not contain tensor data.
    (output / "safetensors" / file.parent.name).write_bytes(struct.pack("<Q", len(raw)) + raw[:end])
    names = [name for name in json.loads(raw[8:end]) if name != "__metadata__"]
    index = {"metadata": {"total_size": len(raw) - end}, "weight_map": {name: "model-00001.safetensors" for name in names}}
    (output / "weight_map" / file.parent.name).write_text(json.dumps(index))
    # A small header mutates faster.
    small = {name: json.loads(raw[8:end])[name] for name in names[:2]}
    offset = 0
    for entry in small.values():
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["data_offsets"] = [offset, offset + size]
        offset += size
    header = json.dumps(small).encode()
    seed = struct.pack("<QQ", 8 + len(header) + offset, len(header)) + header
    (output / "safetensors" / (file.parent.name + "-small")).write_bytes(seed)
(output / "rendezvous").mkdir(parents=True, exist_ok=True)
magic = struct.pack("<Q", 0x3270617473746F6F)
for size in (24, 48, 80):  # challenge, reply, hello
    (output / "rendezvous" / f"rendezvous-{size}").write_bytes(magic.ljust(size, b"\0"))
(output / "rendezvous" / "beat").write_bytes(bytes(512))
(output / "rendezvous" / "welcome").write_bytes(struct.pack("<i", -1).ljust(512, b"\0"))

(output / "token_lists" / "lists").write_text("[[1, 2, 3], [], [0, 511, -1, 2147483647]]")
# max_new, draft, synthetic, chunk, page, prefill, prompts, kvp, tpa, pp, dp, layers, heads, head_dim
numbers = {
    "prompts": [16, 1, 0, 16, 64, 256, 3, 2, 2, 1, 1, 2, 8, 64],
    "synthetic": [16, 1, 1 << 20, 4096, 64, 256, 0, 8, 1, 2, 4, 64, 64, 128],
    "limits": [1, 64, (1 << 40) - 1, (1 << 31) - 1, 1 << 24, 1 << 20, 0, 1 << 15, 1, 1, 2, 1 << 20, 1 << 20, 1 << 10],
}
for name, values in numbers.items():
    (output / "request" / name).write_bytes(struct.pack("<16q", *values, 0, 0))
commands = [
    '{"id":"a","prompt":[1,2,3],"max_tokens":8,"stop":[4],"ignore_eos":true,"log_probs":2}',
    '{"id":"b","prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20],"temperature":0.7,"top_p":0.9,"top_k":3,"min_p":0.1,"seed":1}',
    '{"id":"c","prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,21],"repetition_penalty":1.2,"presence_penalty":1}',
    '{"cancel":"a"}', '{"stats":true}', '{"forget":true}', '{"id":"b","prompt":[1],"frequency_penalty":-1}', "nonsense",
]
(output / "commands" / "session").write_text("\n".join(commands))
for number, command in enumerate(commands):
    (output / "commands" / f"line-{number}").write_text(command)
machine = {
    "based_on": "h200", "name": "m", "memory_gb": 100, "usable_memory_fraction": 0.9, "read_gb_per_s": [[1, 1], [1e6, 2000]],
    "attention_gb_per_s": 3000, "peaks": [{"bits": 8, "tflops": 2000}, {"bits": 16, "tflops": 1000}], "nvlink_domain": 8,
    "inside": {"latency_us": 2, "gb_per_s": 400}, "outside": {"latency_us": 5, "gb_per_s": 50},
    "measured": [{"collective": "all_to_all", "ranks": 4, "points": [[1e4, 10], [1e6, 20]]}],
    "overheads": {"per_operator_us": 2, "per_layer_us": 1},
}
(output / "hardware" / "machine").write_text(json.dumps(machine))
(output / "hardware" / "preset").write_text('{"based_on": "gb200"}')
for file in sorted((data.parent.parent / "bench" / "results").glob("*.json")):
    results = json.loads(file.read_text())
    # One case of each family mutates faster.
    families = {case["name"].split("/")[0]: case for case in results["benchmarks"]}
    (output / "bench_results" / file.stem).write_text(json.dumps({"benchmarks": list(families.values())}))
