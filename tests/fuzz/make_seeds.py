#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the fuzz corpora from tests/data: make_seeds.py OUTPUT makes OUTPUT/safetensors, OUTPUT/model_config and
OUTPUT/rendezvous."""
import argparse
import json
import pathlib
import struct

data = pathlib.Path(__file__).resolve().parent.parent / "data"
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", type=pathlib.Path)
output = parser.parse_args().output
(output / "safetensors").mkdir(parents=True, exist_ok=True)
(output / "model_config").mkdir(parents=True, exist_ok=True)
for config in sorted(data.glob("*/config.json")):
    (output / "model_config" / config.parent.name).write_bytes(config.read_bytes())
for file in sorted(data.glob("*/model.safetensors")):
    raw = file.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    # The target takes the file's size from the first 8 bytes, so that the tensors' data need not be in the corpus.
    (output / "safetensors" / file.parent.name).write_bytes(struct.pack("<Q", len(raw)) + raw[:end])
    names = [name for name in json.loads(raw[8:end]) if name != "__metadata__"]
    index = {"metadata": {"total_size": len(raw) - end}, "weight_map": {name: "model-00001.safetensors" for name in names}}
    (output / "model_config" / (file.parent.name + "-index")).write_text(json.dumps(index))
    # A small header, which mutates faster.
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
magic = struct.pack("<Q", 0x3170617473746F6F)
for size in (24, 48, 80):  # challenge, reply, hello
    (output / "rendezvous" / f"rendezvous-{size}").write_bytes(magic.ljust(size, b"\0"))
(output / "rendezvous" / "beat").write_bytes(bytes(512))
(output / "rendezvous" / "welcome").write_bytes(struct.pack("<i", -1).ljust(512, b"\0"))
