#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decodes random checkpoints under random topologies and options, and compares tokens and logits with one rank on one thread.

Checkpoints have all supported families, odd sizes, windows, biases, experts and ropes, with random weights. Needs Python's standard library only.
With --device cuda f32 runs are compared with f32 on the CPU; runs of 16 bits with types of KV of 16 and 8 bits must come near to it."""
import argparse
import array
import json
import math
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
F32_TOLERANCE = 2e-3  # relative, of norms of logits
# Of the first logits in 16 bits, in units of their root mean square. Other logits would be off by 2 and more; routers may choose other experts.
HALF_TOLERANCE = 1.0
ROUTED_TOLERANCE = 10.0
RUNS = 4  # of each checkpoint
SKIPPED = 77  # exit status that ctest counts as skipped


class Checkpoint:
    """A random config.json and its weights."""

    def __init__(self, rng):
        self.rng = rng
        self.tensors = {}
        self.gain = rng.choice([1.0, 1.5])
        self.dtype = rng.choice(["F32", "BF16", "BF16", "F16"])
        family = rng.choice(["llama", "llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "deepseek_v3"])
        self.is_latent = family.startswith("deepseek")
        self.config = {
            "model_type": family, "hidden_act": "silu", "torch_dtype": DTYPES[self.dtype], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_size": rng.choice([32, 48, 64, 96, 128, rng.randrange(8, 160)]), "num_hidden_layers": rng.randrange(1, 4),
            "intermediate_size": rng.choice([32, 64, 96, 128, rng.randrange(5, 200)]), "vocab_size": rng.randrange(40, 400),
            "rms_norm_eps": rng.choice([1e-5, 1e-6]), "max_position_embeddings": rng.choice([512, 2048, 8192]),
            "tie_word_embeddings": rng.random() < 0.2, "rope_parameters": self.rope(),
        }
        if self.is_latent:
            self.draw_latents()
        else:
            self.draw_heads()
        self.add_weights()

    def __getitem__(self, key):
        return self.config[key]

    def rope(self):
        rope = {"rope_type": self.rng.choice(["default", "default", "linear", "llama3", "yarn"]), "rope_theta": self.rng.choice([1e4, 5e5])}
        if rope["rope_type"] == "linear":
            rope["factor"] = 4.0
        elif rope["rope_type"] == "llama3":
            rope.update(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
        elif rope["rope_type"] == "yarn":
            rope.update(factor=8.0, beta_fast=32, beta_slow=1, original_max_position_embeddings=64)
            if self.is_latent:
                rope.update(mscale=1.0, mscale_all_dim=self.rng.choice([1.0, 0.707]))
        return rope

    def draw_heads(self):
        rng, config = self.rng, self.config
        kv_heads = rng.choice([1, 2, 2, 3, 4, 8])
        group = rng.choice([group for group in (1, 2, 3, 4, 7, 8) if kv_heads * group <= 24])
        config.update(num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads,
                      head_dim=rng.choice([8, 16, 32, 64, 64, 80, 96, 112, 128, 128, 2 * rng.randrange(1, 70)]))
        family = config["model_type"]
        if family in ("llama", "qwen3"):
            config["attention_bias"] = rng.random() < 0.3
        if family == "llama":
            config["mlp_bias"] = rng.random() < 0.2
        elif rng.random() < 0.6:
            config["sliding_window"] = rng.choice([3, 17, 64, 100])
            if family != "mistral":
                config.update(use_sliding_window=True, max_window_layers=rng.randrange(config["num_hidden_layers"] + 1))
        elif family == "mistral":
            config["sliding_window"] = None

    def draw_latents(self):
        rng, config = self.rng, self.config
        has_kernels = rng.random() < 0.4  # of GPUs, over latents of these sizes
        heads = rng.choice([1, 2, 3, 4, 8, 16])
        config.update(num_attention_heads=heads, num_key_value_heads=heads, attention_bias=False,
                      kv_lora_rank=512 if has_kernels else rng.choice([16, 32, 64, 100, 256]),
                      qk_rope_head_dim=64 if has_kernels else rng.choice([8, 16, 32, 64]), qk_nope_head_dim=rng.choice([16, 24, 32, 128]),
                      v_head_dim=rng.choice([16, 20, 32, 128]), q_lora_rank=rng.choice([None, 24, 48]))
        experts = rng.choice([4, 8, 12])
        groups = rng.choice([groups for groups in (1, 2, 3, 4) if experts % groups == 0 and experts // groups >= 2])
        kept = rng.randrange(1, groups + 1)
        config.update(n_routed_experts=experts, n_group=groups, topk_group=kept,
                      num_experts_per_tok=rng.randrange(1, min(6, kept * experts // groups) + 1),
                      moe_intermediate_size=rng.choice([16, 24, 32, rng.randrange(4, 50)]), n_shared_experts=rng.choice([0, 1, 2]),
                      first_k_dense_replace=rng.randrange(config["num_hidden_layers"] + 1), routed_scaling_factor=rng.choice([1.0, 2.5]))
        if config["model_type"] == "deepseek_v2":
            config.update(topk_method="greedy" if groups == 1 else "group_limited_greedy", scoring_func="softmax", norm_topk_prob=False)
        else:
            config.update(norm_topk_prob=rng.random() < 0.8, num_nextn_predict_layers=0, rope_interleave=rng.random() < 0.7)

    def add(self, name, *shape, deviation=None, mean=0.0):
        if deviation is None:
            deviation = self.gain / math.sqrt(shape[-1])
        self.tensors[name] = (shape, array.array("f", (self.rng.gauss(mean, deviation) for _ in range(math.prod(shape)))))

    def add_norm(self, name, size):
        self.add(name, size, deviation=0.1, mean=1.0)

    def add_product(self, name, rows, columns, has_bias=False):
        self.add(name + ".weight", rows, columns)
        if has_bias:
            self.add(name + ".bias", rows, deviation=0.3)

    def add_mlp(self, name, ffn, has_bias=False):
        for part in ("gate_proj", "up_proj"):
            self.add_product(name + part, ffn, self["hidden_size"], has_bias)
        self.add_product(name + "down_proj", self["hidden_size"], ffn, has_bias)

    def add_heads(self, name):
        hidden, size, family = self["hidden_size"], self["head_dim"], self["model_type"]
        has_bias = self.config.get("attention_bias", False)
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            self.add_product(f"{name}{part}_proj", self[heads] * size, hidden, has_bias or family == "qwen2")
        self.add_product(name + "o_proj", hidden, self["num_attention_heads"] * size, has_bias)
        if family == "qwen3":
            self.add_norm(name + "q_norm.weight", size)
            self.add_norm(name + "k_norm.weight", size)

    def add_latents(self, name):
        hidden, heads, rank, rope = self["hidden_size"], self["num_attention_heads"], self["kv_lora_rank"], self["qk_rope_head_dim"]
        queries = heads * (self["qk_nope_head_dim"] + rope)
        if self["q_lora_rank"] is None:
            self.add_product(name + "q_proj", queries, hidden)
        else:
            self.add_product(name + "q_a_proj", self["q_lora_rank"], hidden)
            self.add_norm(name + "q_a_layernorm.weight", self["q_lora_rank"])
            self.add_product(name + "q_b_proj", queries, self["q_lora_rank"])
        self.add_product(name + "kv_a_proj_with_mqa", rank + rope, hidden)
        self.add_norm(name + "kv_a_layernorm.weight", rank)
        self.add_product(name + "kv_b_proj", heads * (self["qk_nope_head_dim"] + self["v_head_dim"]), rank)
        self.add_product(name + "o_proj", hidden, heads * self["v_head_dim"])

    def add_experts(self, name):
        self.add(name + "gate.weight", self["n_routed_experts"], self["hidden_size"])
        if self["model_type"] == "deepseek_v3":
            self.add(name + "gate.e_score_correction_bias", self["n_routed_experts"], deviation=0.1)
        for expert in range(self["n_routed_experts"]):
            self.add_mlp(f"{name}experts.{expert}.", self["moe_intermediate_size"])
        if self["n_shared_experts"] > 0:
            self.add_mlp(name + "shared_experts.", self["moe_intermediate_size"] * self["n_shared_experts"])

    def add_weights(self):
        hidden, vocabulary = self["hidden_size"], self["vocab_size"]
        self.add("model.embed_tokens.weight", vocabulary, hidden, deviation=1.0)
        if not self["tie_word_embeddings"]:
            self.add("lm_head.weight", vocabulary, hidden, deviation=2.0 / math.sqrt(hidden))
        self.add_norm("model.norm.weight", hidden)
        for layer in range(self["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            self.add_norm(name + "input_layernorm.weight", hidden)
            self.add_norm(name + "post_attention_layernorm.weight", hidden)
            if self.is_latent:
                self.add_latents(name + "self_attn.")
            else:
                self.add_heads(name + "self_attn.")
            if self.is_latent and layer >= self["first_k_dense_replace"]:
                self.add_experts(name + "mlp.")
            else:
                self.add_mlp(name + "mlp.", self["intermediate_size"], self.config.get("mlp_bias", False))

    def stored(self, values):
        if self.dtype == "F32":
            return values.tobytes()
        if self.dtype == "F16":
            return struct.pack(f"<{len(values)}e", *values)
        words = array.array("I", values.tobytes())
        return array.array("H", ((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words)).tobytes()

    def write(self, folder):
        (folder / "config.json").write_text(json.dumps(self.config))
        header, parts, offset = {}, [], 0
        for name, (shape, values) in self.tensors.items():
            parts.append(self.stored(values))
            header[name] = {"dtype": self.dtype, "shape": shape, "data_offsets": [offset, offset + len(parts[-1])]}
            offset += len(parts[-1])
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))

    def has_experts(self):
        return self.is_latent and self["first_k_dense_replace"] < self["num_hidden_layers"]

    def topologies(self, ranks):
        """All (kvp, tpa, ep) of so many ranks that the model's sizes allow."""
        has_experts = self.has_experts()
        experts = self["n_routed_experts"] if has_experts else 1
        if self["num_attention_heads"] % ranks or self["intermediate_size"] % ranks:
            return []
        found = []
        for tpa in range(1, ranks + 1):
            if ranks % tpa or self["num_key_value_heads"] % tpa or (self.is_latent and tpa > 1):
                continue
            for ep in range(1, ranks + 1):
                if ranks % ep or experts % ep:
                    continue
                expert_ffn = self["moe_intermediate_size"] if has_experts else 0
                if expert_ffn % (ranks // ep) or (has_experts and expert_ffn * self["n_shared_experts"] % ranks):
                    continue
                found.append((ranks // tpa, tpa, ep))
        return found


class Decoder:
    """helix-decode over one checkpoint's prompts."""

    def __init__(self, program, folder, arguments):
        self.program = program
        self.folder = folder
        self.arguments = arguments

    def run(self, *arguments):
        """Returns the sequences of the report, and the error line if there is none."""
        report = self.folder / "report.json"
        command = [self.program, *self.arguments, *arguments, "--json", report]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            return None, f"exit status {done.returncode}: {done.stderr.strip()[-500:]}"
        return json.loads(report.read_text())["sequences"], ""


def f32_problem(expected, found):
    for one, other in zip(expected, found, strict=True):
        if one["tokens"] != other["tokens"]:
            return f"tokens {other['tokens']} instead of {one['tokens']}"
        for norm, other_norm in zip(one["logits_norm"], other["logits_norm"], strict=True):
            if not abs(norm - other_norm) <= F32_TOLERANCE * norm:
                return f"a norm of logits is {other_norm} instead of {norm}"
    return ""


def half_problem(expected, found, checkpoint):
    tolerance = ROUTED_TOLERANCE if checkpoint.has_experts() else HALF_TOLERANCE
    for one, other in zip(expected, found, strict=True):
        unit = one["logits_norm"][0] / math.sqrt(checkpoint["vocab_size"])
        for logit, other_logit in zip(one["logits_first8"][0], other["logits_first8"][0], strict=True):
            if not abs(logit - other_logit) <= tolerance * unit:
                return f"a first logit is {other_logit} instead of {logit}"
    return ""


def random_options(rng, checkpoint, is_cuda):
    options = ["--chunk", rng.choice([1, 4, 16, 33]), "--page-tokens", rng.choice([1, 5, 8, 16, 64, 64]),
               "--prefill-tokens", rng.choice([1, 7, 64, 256, 2048])]
    options += ["--cuda-graphs", rng.choice(["on", "on", "off"])] if is_cuda else ["--threads", rng.choice([1, 2])]
    topologies = checkpoint.topologies(rng.choice([1, 1, 2, 3, 4]))
    if topologies:
        kvp, tpa, ep = rng.choice(topologies)
        options += ["--kvp", kvp, "--tpa", tpa, "--ep", ep]
        if is_cuda and kvp * tpa > 1:
            options += ["--peer-memory", rng.choice(["on", "off"])]
    if checkpoint["num_hidden_layers"] >= 2 and rng.random() < 0.15:
        options += ["--pp", 2]
    if checkpoint.is_latent:
        options += ["--mla-prefill", rng.choice(["auto", "absorbed", "expanded"])]
    if rng.random() < 0.2:
        options += ["--hop-b", rng.choice([2, 3])]
    return options


def half_types(rng, checkpoint):
    activation = rng.choice(["bf16", "f16"])
    kv = [activation, "fp8_e4m3"]
    if checkpoint.is_latent:
        kv.append("fp8_ds_mla")
    return ["--activation", activation, "--kv-dtype", rng.choice(kv)]


def check(program, seed, device, folder):
    """Yields (options, problem) of each run of the checkpoint of `seed`; the problem is empty if there is none."""
    rng = random.Random(seed)
    checkpoint = Checkpoint(rng)
    checkpoint.write(folder)
    sequences = rng.choice([1, 1, 2, 3, 5, 9, 40])
    longest = 20 if sequences == 40 else rng.choice([4, 20, 90, 300])
    prompts = [[rng.randrange(3, checkpoint["vocab_size"]) for _ in range(rng.randint(1, longest))] for _ in range(sequences)]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    decoder = Decoder(program, folder, ["--model", folder, "--prompts", folder / "prompts.json", "--max-new-tokens", rng.choice([4, 12, 24]),
                                        "--ignore-eos"])
    f32 = ["--activation", "f32", "--kv-dtype", "f32"]
    expected, problem = decoder.run(*f32, "--device", "cpu", "--threads", 1)
    if problem:
        yield "one rank", problem
        return
    (folder / "teacher.json").write_text(json.dumps([sequence["tokens"] for sequence in expected]))
    teacher = ["--teacher-force", folder / "teacher.json", "--draft-tokens"]
    for run in range(RUNS):
        is_half = device == "cuda" and run == RUNS - 1
        options = ["--device", device, *random_options(rng, checkpoint, device == "cuda")]
        if is_half:
            options += [*half_types(rng, checkpoint), *teacher, rng.choice([1, 1, 2, 5])]
        else:
            options += f32 + ([*teacher, rng.choice([1, 2, 4, 9])] if rng.random() < 0.3 else [])
        found, problem = decoder.run(*options)
        if not problem:
            problem = half_problem(expected, found, checkpoint) if is_half else f32_problem(expected, found)
        yield " ".join(map(str, options)), problem


def has_gpu(program):
    """Whether helix-decode finds a GPU; says why if it does not."""
    model = pathlib.Path(__file__).resolve().parent.parent / "data" / "llama-tiny"
    command = [program, "--model", model, "--prompt-ids", "1", "--max-new-tokens", "1", "--device", "cuda"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=False)
    has_none = "--device cuda: " in done.stderr
    if has_none:
        print(f"skipped: {done.stderr.strip()}")
    return not has_none


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path, help="helix-decode")
    parser.add_argument("--seed", type=int, default=1, help="of the first checkpoint")
    parser.add_argument("--checkpoints", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begins no further checkpoint after these")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    begin = time.monotonic()
    runs = failures = 0
    if options.device == "cuda" and not has_gpu(options.program.resolve()):
        return SKIPPED
    for seed in range(options.seed, options.seed + options.checkpoints):
        if time.monotonic() - begin > options.seconds:
            break
        folder = pathlib.Path(tempfile.mkdtemp())
        is_kept = False
        for arguments, problem in check(options.program.resolve(), seed, options.device, folder):
            runs += 1
            if problem:
                failures += 1
                is_kept = True
                print(f"seed {seed}, checkpoint kept in {folder}: {arguments}: {problem}", flush=True)
        if not is_kept:
            shutil.rmtree(folder)
    print(f"{runs} runs, {failures} wrong")
    return 1 if failures > 0 or runs == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
