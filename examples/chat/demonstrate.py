#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Completes a few prompts with small trained models, on one rank and on several, and compares: demonstrate.py DECODER
CHECKPOINTS. The models were trained on the definitions of WordNet: they write English, and invent what it says."""
import pathlib
import sys

from decoder import Answer, Decoder, DecoderError
from text import TextError, TextModel

PROMPTS = ("helix:", "attention: the", "river: a")
MAX_TOKENS = 32
# f32, so that every topology generates the same tokens.
EXACT = ("--activation", "f32", "--kv-dtype", "f32", "--context", "1K", "--max-sequences", "4")
RUNS = (
    ("llama-wordnet", ((), ("--kvp", "2", "--tpa", "2"))),
    ("deepseek-wordnet", ((), ("--kvp", "4", "--ep", "2"))),
)


class Style:
    """Colours, on a terminal only."""

    def __init__(self) -> None:
        is_terminal = sys.stdout.isatty()
        self.command, self.prompt, self.good = ("\x1b[2m", "\x1b[1m", "\x1b[32m") if is_terminal else ("", "", "")
        self.end = "\x1b[0m" if is_terminal else ""


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def run(decoder_path: str, checkpoint: pathlib.Path, widths: tuple[str, ...], style: Style) -> list[list[int]]:
    """Prints what one topology answers. Returns the tokens."""
    model = TextModel(checkpoint)
    shown = ["./run.sh chat --raw --max-tokens", str(MAX_TOKENS), "--model", str(checkpoint), "TEXT --", *EXACT, *widths]
    print(f"\n{style.command}$ {' '.join(shown)}{style.end}")
    tokens = []
    ttl = []
    with Decoder([decoder_path, "--model", str(checkpoint), *EXACT, *widths]) as decoder:
        decoder.wait_until_ready()
        for prompt in PROMPTS:
            answer = Answer()
            tokens.append(list(decoder.complete(model.encode(prompt), answer, max_tokens=MAX_TOKENS)))
            stream = model.stream(keep_special=False)
            text = "".join(stream.add(token) for token in tokens[-1]) + stream.finish()
            print(f"{style.prompt}{prompt}{style.end}{text}")
            ttl.append(answer.timing["ttl_ms"])
        memory = decoder.abilities["memory"]
        print(
            f"TTL {sorted(ttl)[len(ttl) // 2]:.2f} ms; memory of rank 0: weights {mebibytes(memory['weights_bytes'])}, "
            f"KV cache {mebibytes(memory['kv_bytes'])}, workspace {mebibytes(memory['workspace_bytes'])}"
        )
    return tokens


def main(decoder_path: str, checkpoints: pathlib.Path) -> int:
    style = Style()
    try:
        for name, topologies in RUNS:
            one_rank = None
            for widths in topologies:
                tokens = run(decoder_path, checkpoints / name, widths, style)
                if one_rank is None:
                    one_rank = tokens
                elif tokens != one_rank:
                    print(f"demonstrate: {name} with {' '.join(widths)} gives other tokens than one rank", file=sys.stderr)
                    return 1
                else:
                    print(f"{style.good}verified: the ranks give the tokens of one rank{style.end}")
    except (DecoderError, TextError) as error:
        print(f"demonstrate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], pathlib.Path(sys.argv[2])))
