# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, as a checkpoint's own files say."""
import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator

import apart
from template import TemplateError, render
from tokenizers import Tokenizer

_MAX_FILE_BYTES = 16_000_000  # the limit of helix-decode for a config.json
_MAX_TOKENIZER_BYTES = 128_000_000  # three times the largest that is known
_MAX_ENCODE_SECONDS = 60.0  # a million tokens take seconds
_MAX_ENCODE_MEMORY_MIB = 4096  # a million tokens take 1 GB
_MAX_IDS_BYTES = 100_000_000  # some 12 million tokens
_DECODE_LIMITS = {"seconds": 10.0, "memory_mib": 1024, "max_bytes": 4_000_000}  # for the few tokens of a character
_NO_TEXT = "the tokenizer cannot give the text of tokens"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextError(Exception):
    """What is missing or wrong with a checkpoint's text files, in one line."""


class TextModel:
    """The tokenizer of a checkpoint, and its chat template if it has one."""

    def __init__(self, checkpoint: pathlib.Path) -> None:
        file = checkpoint / "tokenizer.json"
        if not file.is_file():
            raise TextError(f"{file}: missing; text needs a checkpoint with its tokenizer, token ids go to ./run.sh decode")
        _refuse_lfs_pointer(file)
        _refuse_large(file, _MAX_TOKENIZER_BYTES)
        with _without_standard_error(), _errors_of_tokenizers(str(file)):
            self._tokenizer = Tokenizer.from_file(str(file))
        # The file may still have the truncation used in training, but a prompt must stay whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_json(checkpoint / "tokenizer_config.json")
        self._special_tokens = _read_json(checkpoint / "special_tokens_map.json")
        self._template_file, self._template = self._find_template(checkpoint)
        # Decoders of strangers may multiply a text too.
        self._decoder = apart.Worker(self._decode_apart, **_DECODE_LIMITS)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """A prompt as it is, with the special tokens that go before one: those of tokenizer.json, and the first one as
        add_bos_token of tokenizer_config.json says."""
        ids = self._ids(text, add_special_tokens=True)
        adds_bos = self._config.get("add_bos_token")
        if adds_bos is None:
            return ids
        if not isinstance(adds_bos, bool):
            raise TextError(f"tokenizer_config.json: add_bos_token is {adds_bos!r}, not true or false")
        token = self._special("bos_token")
        bos = self._tokenizer.token_to_id(token) if token else None
        if adds_bos:
            if bos is None:
                raise TextError(f"tokenizer_config.json: add_bos_token is true, but bos_token {token!r} is no token")
            return ids if ids[:1] == [bos] else [bos, *ids]
        # A token that the text itself begins with must stay.
        is_added = bos is not None and ids[:1] == [bos] and ids[1:] == self._ids(text, add_special_tokens=False)
        return ids[1:] if is_added else ids

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """A conversation, ready for the assistant's next message."""
        names = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._template_tokens(),
        }
        try:
            text = render(self._template, names)
        except TemplateError as error:
            raise TextError(f"{self._template_file}: the chat template {error}") from None
        # The template writes the special tokens itself.
        return self._ids(text, add_special_tokens=False)

    def stream(self, keep_special: bool) -> "TextStream":
        return TextStream(lambda ids: self._text(ids, keep_special))

    def _text(self, ids: list[int], keep_special: bool) -> str:
        with _endings_told(_NO_TEXT, "see its decoder", **_DECODE_LIMITS):
            return self._decoder.ask(json.dumps([ids, keep_special]).encode()).decode()

    def _decode_apart(self, question: bytes) -> bytes:
        ids, keep_special = json.loads(question)
        with _errors_of_tokenizers(_NO_TEXT, apart.Failed):
            return self._tokenizer.decode(ids, skip_special_tokens=not keep_special).encode()

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"the text is not UTF-8: {error}") from None
        where = "the tokenizer cannot take the text"

        def encode() -> bytes:  # normalizers of strangers may multiply a text, or search it without end
            with _errors_of_tokenizers(where, apart.Failed):
                ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return json.dumps(ids).encode()

        limits = {"seconds": _MAX_ENCODE_SECONDS, "memory_mib": _MAX_ENCODE_MEMORY_MIB, "max_bytes": _MAX_IDS_BYTES}
        with _endings_told(where, "see its normalizer and patterns, or give a shorter text", **limits):
            return json.loads(apart.run(encode, **limits))

    def _find_special(self, name: str) -> tuple[str, object]:
        """The file that names a special token, and what it says; special_tokens_map.json counts where the other is silent."""
        if self._config.get(name):
            return "tokenizer_config.json", self._config[name]
        return "special_tokens_map.json", self._special_tokens.get(name)

    def _special(self, name: str) -> str:
        file, token = self._find_special(name)
        text = _content(token or "")
        if not isinstance(text, str):
            raise TextError(f"{file}: {name} is {text!r}, not text")
        return text

    def _template_tokens(self) -> dict:
        """The special tokens that there are, by name, and as text the two that templates take for granted."""
        tokens: dict = {name: self._special(name) for name in _SPECIAL_TOKENS}
        tokens = {name: text for name, text in tokens.items() if text or name in ("bos_token", "eos_token")}
        file, more = self._find_special("additional_special_tokens")
        if more:
            texts = [_content(token) for token in more] if isinstance(more, list) else [more]
            if not isinstance(more, list) or not all(isinstance(text, str) for text in texts):
                raise TextError(f"{file}: additional_special_tokens is {more!r}, not a list of texts")
            tokens["additional_special_tokens"] = texts
        return tokens

    def _find_template(self, checkpoint: pathlib.Path) -> tuple[pathlib.Path, str | None]:
        """The file that may have a template, and the template."""
        file = checkpoint / "chat_template.jinja"
        if os.path.lexists(file):
            return file, _read_text(file)
        file = checkpoint / "tokenizer_config.json"
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several templates, by name
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise TextError(f"{file}: chat_template is {template!r}, not text")
        return file, template


def _content(token: object) -> object:
    """What a token of tokenizer_config.json says, alone or among its properties."""
    return token.get("content", "") if isinstance(token, dict) else token


class TextStream:
    """Text of tokens that come one by one; a character of several tokens comes with its last."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # Ids of the part told last, which the next ids are decoded with, and ids that came since.
        self._ids: list[int] = []
        self._num_told = 0

    def add(self, token: int) -> str:
        self._ids.append(token)
        text = self._untold()
        if not text or text.endswith("\ufffd"):  # perhaps the beginning of a character
            return ""
        del self._ids[: self._num_told]
        self._num_told = len(self._ids)
        return text

    def finish(self) -> str:
        """What is held at the end: U+FFFD for bytes that are no character."""
        text = self._untold()
        self._ids, self._num_told = [], 0
        return text

    def _untold(self) -> str:
        if not self._ids:
            return ""
        told = self._decode(self._ids[: self._num_told]) if self._num_told > 0 else ""
        text = self._decode(self._ids)
        # An invalid byte makes the preceding byte tokens invalid too.
        return text[len(told) :] if text.startswith(told) else self._decode(self._ids[self._num_told :])


@contextlib.contextmanager
def _without_standard_error() -> Iterator[None]:
    """Has what is written to the process's standard error go nowhere: a panic of Rust code prints itself and a backtrace."""
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _errors_of_tokenizers(where: str, kind: type[Exception] = TextError) -> Iterator[None]:
    """Says in an error of this kind what the library raises."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of its Rust code is not an Exception
        raise kind(f"{where}: {error}") from None


@contextlib.contextmanager
def _endings_told(where: str, remedy: str, *, seconds: float, memory_mib: int, max_bytes: int) -> Iterator[None]:
    """Says in a TextError how work apart has ended that was not done within these limits."""
    try:
        yield
    except OSError as error:
        raise TextError(f"{where}: no process can be started for it: {error.strerror}") from None
    except apart.Failed as failure:
        raise TextError(str(failure)) from None
    except apart.TooSlow:
        raise TextError(f"{where} within {seconds:g} s; {remedy}") from None
    except apart.TooLong:
        raise TextError(f"{where}: the result has more than {max_bytes} bytes; {remedy}") from None
    except (apart.TooMuchMemory, apart.Died) as ending:  # Rust ends a process that gets no memory
        how = f" (its process ended with {ending})" if isinstance(ending, apart.Died) else ""
        raise TextError(f"{where} with {memory_mib} MiB of memory{how}; {remedy}") from None


def _refuse_lfs_pointer(file: pathlib.Path) -> None:
    try:
        with file.open("rb") as begin:
            is_pointer = begin.read(8) == b"version "
    except OSError as error:
        raise TextError(f"{file}: {error.strerror}") from None
    if is_pointer:
        raise TextError(f"{file}: is a Git LFS pointer in place of the file; run git lfs pull in its folder")


def _refuse_large(file: pathlib.Path, max_bytes: int) -> None:
    size = file.stat().st_size
    if size > max_bytes:
        raise TextError(f"{file}: has {size} bytes; expected at most {max_bytes}")


def _read_text(file: pathlib.Path) -> str:
    if not file.is_file():
        raise TextError(f"{file}: is no file, or a link that leads to none; fetch it again, or remove it")
    _refuse_lfs_pointer(file)
    _refuse_large(file, _MAX_FILE_BYTES)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TextError(f"{file}: {error}") from None


def _read_json(file: pathlib.Path) -> dict:
    if not os.path.lexists(file):
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise TextError(f"{file}: {error}") from None
    if not isinstance(value, dict):
        raise TextError(f"{file}: holds no JSON object")
    return value
