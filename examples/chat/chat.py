#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Talks with a checkpoint: text in, text out, over helix-decode --serve."""
import argparse
import math
import os
import pathlib
import signal
import sys
import time

from decoder import Answer, Decoder, DecoderError
from text import TextError, TextModel

EPILOG = """Sampling options that are not given follow generation_config.json.
Options after -- go to helix-decode, such as -- --kvp 2 --device cuda; see ./run.sh decode --help.
Without TEXT, a conversation begins in a terminal (/new begins another, Ctrl-C ends an answer, Ctrl-D the program). A
pipe is read to its end as one prompt."""


def number(text: str) -> float:
    """A value that JSON can hold."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    own, decode_options = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, decode_options = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="./run.sh chat", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="*", metavar="TEXT", help="a prompt; the answer is printed and the program ends")
    parser.add_argument("--model", required=True, type=pathlib.Path, help="checkpoint directory with its tokenizer")
    parser.add_argument("--decoder", default="helix-decode", help=argparse.SUPPRESS)
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--system", help="system message that starts the conversation")
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=number, help="0: the likeliest token")
    parser.add_argument("--top-p", type=number, help="nucleus probability")
    parser.add_argument("--top-k", type=int, help="keep the k likeliest tokens")
    parser.add_argument("--min-p", type=number, help="drop tokens less likely than this times the likeliest's probability")
    parser.add_argument("--repetition-penalty", type=number, help="above 1: make tokens that have occurred less likely")
    parser.add_argument("--seed", type=int, help="seed of the draws")
    parser.add_argument("--ignore-eos", action="store_true", help="continue after the end of an answer")
    parser.add_argument("--special", action="store_true", help="print special tokens too")
    parser.add_argument("--stats", action="store_true", help="print times and token counts after each answer")
    options = parser.parse_args(own)
    if options.max_tokens < 1:
        parser.error(f"--max-tokens is {options.max_tokens}; give at least 1")
    if options.raw and options.system is not None:
        parser.error("--system is of a conversation; leave it out with --raw")
    options.decode_options = decode_options
    return options


class Chat:
    """A conversation, or single prompts, with one decoder."""

    def __init__(self, options: argparse.Namespace, model: TextModel, decoder: Decoder, start: float) -> None:
        self._options = options
        self._model = model
        self._decoder = decoder
        self._start = start
        self._first_token_after: float | None = None
        self._is_raw = options.raw or not model.has_template
        self.begin()

    def begin(self) -> None:
        """Forgets what was said."""
        system = self._options.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """Answers on standard output. Ctrl-C ends the answer."""
        answer = Answer()
        if self._is_raw:
            self._print_answer(self._model.encode(text), answer)
        else:
            messages = [*self._messages, {"role": "user", "content": text}]
            said = self._print_answer(self._model.encode_chat(messages), answer)
            self._messages = [*messages, {"role": "assistant", "content": said}]
        if self._options.stats:
            self._print_stats(answer)

    def _print_answer(self, prompt: list[int], answer: Answer) -> str:
        """Returns the answer as the conversation goes on with it, whatever of it is shown."""
        options = self._options
        room = self._decoder.abilities["context"] - len(prompt)
        shown_stream = self._model.stream(options.special)
        stream = self._model.stream(keep_special=False)  # the template writes special tokens itself
        shown = said = ""
        previous = signal.signal(signal.SIGINT, lambda *_: self._decoder.cancel())
        try:
            for token in self._decoder.complete(
                prompt,
                answer,
                max_tokens=max(1, min(options.max_tokens, room)),
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                min_p=options.min_p,
                repetition_penalty=options.repetition_penalty,
                seed=options.seed,
                ignore_eos=options.ignore_eos or None,
            ):
                if self._first_token_after is None:
                    self._first_token_after = time.monotonic() - self._start
                shown += self._print(shown_stream.add(token))
                said += stream.add(token)
            shown += self._print(shown_stream.finish())
            said += stream.finish()
        finally:
            signal.signal(signal.SIGINT, previous)
        if not shown.endswith("\n"):
            sys.stdout.write("\n")
        return said

    @staticmethod
    def _print(part: str) -> str:
        sys.stdout.write(part)
        sys.stdout.flush()
        return part

    def _print_stats(self, answer: Answer) -> None:
        usage, timing = answer.usage, answer.timing
        print(
            f"[{usage['prompt_tokens']} prompt tokens, {usage['cached_tokens']} from the cache; "
            f"{usage['completion_tokens']} tokens; prefill {timing['prefill_ms']:.1f} ms, "
            f"TTL {timing['ttl_ms']:.2f} ms; first token {self._first_token_after or 0:.2f} s after the start]",
            file=sys.stderr,
        )


def check_draws(options: argparse.Namespace, default_temperature: float) -> None:
    """Refuses what chooses among tokens where the likeliest is taken, as helix-decode does of its own options."""
    temperature = default_temperature if options.temperature is None else options.temperature
    for name in ("top_p", "top_k", "min_p"):
        if temperature == 0 and getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise DecoderError(f"{option} is given, but the likeliest token is taken: give a --temperature, or drop {option}")


def complain(words: str) -> None:
    """Says on one line what is wrong, whatever a file or the system put into it."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    try:
        print(f"chat: {line}", file=sys.stderr)
    except OSError:
        pass  # there is nowhere left to say it


def converse(chat: Chat, decoder: Decoder) -> None:
    """Reads what the person at the terminal says until Ctrl-D."""
    try:
        import readline  # noqa: F401  lets the user edit and recall lines
    except ImportError:
        pass
    while True:
        try:
            text = input("> ")
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if text.strip() == "/new":
            chat.begin()
        elif text.strip():
            try:
                chat.say(text)
            except (DecoderError, TextError) as error:
                if decoder.has_ended():
                    raise
                complain(f"{error}; /new begins a new conversation")


def open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed. Input is then empty, and output to it fails."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR if name == "stderr" else os.O_RDONLY)  # the lowest, so its own
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w"))


def drop_output() -> None:
    """Has what could not be written go nowhere. Python would try it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: list[str]) -> int:
    start = time.monotonic()
    open_closed_streams()
    options = parse_arguments(arguments)
    is_conversation = not options.text and sys.stdin.isatty()
    sys.stdout.reconfigure(errors="replace")  # an answer may have characters that the locale cannot encode
    if not options.text:
        sys.stdin.reconfigure(errors="surrogateescape")  # as for arguments; TextModel refuses what is not UTF-8
    try:
        # The decoder loads the weights while the tokenizer is read.
        with Decoder([options.decoder, "--model", str(options.model), *options.decode_options]) as decoder:
            model = TextModel(options.model)
            if options.system is not None and not model.has_template:
                raise TextError(f"{options.model} has no chat template, which --system needs; leave it out")
            for warning in decoder.wait_until_ready():
                print(warning, file=sys.stderr)
            check_draws(options, decoder.abilities["temperature"])
            chat = Chat(options, model, decoder, start)
            if is_conversation:
                converse(chat, decoder)
            else:
                chat.say(" ".join(options.text) if options.text else sys.stdin.read())
            sys.stdout.flush()
    except (DecoderError, TextError) as error:
        complain(str(error))
        return 1
    except BrokenPipeError:
        drop_output()
        return 1  # nobody reads the answer
    except OSError as error:
        drop_output()
        complain(f"the standard streams fail: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
