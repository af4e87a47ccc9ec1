# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, as a checkpoint's own files say."""
import json
import pathlib

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextError(Exception):
    """What is missing or wrong with a checkpoint's text files, in one line."""


class TextModel:
    """The tokenizer of a checkpoint, and its chat template if it has one."""

    def __init__(self, checkpoint: pathlib.Path) -> None:
        file = checkpoint / "tokenizer.json"
        if not file.is_file():
            raise TextError(f"{file}: missing; text needs a checkpoint with its tokenizer, token ids go to ./run.sh decode")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower one
            raise TextError(f"{file}: {error}") from None
        self._config = _read_json(checkpoint / "tokenizer_config.json")
        self._template = self._find_template(checkpoint)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """A prompt as it is, with the special tokens that the tokenizer puts before one."""
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """A conversation, ready for the assistant's next message."""
        import jinja2  # a prompt as it is does without
        import jinja2.ext
        import jinja2.sandbox

        def refuse(message: str) -> None:
            raise TextError(f"the checkpoint's chat template says: {message}")

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.globals["raise_exception"] = refuse
        try:
            text = environment.from_string(self._template).render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self._special("bos_token"),
                eos_token=self._special("eos_token"),
            )
        except TextError:
            raise
        except Exception as error:  # whatever the template's own expressions raise
            raise TextError(f"the checkpoint's chat template cannot be rendered: {error}") from None
        # The template writes the special tokens itself.
        return self._ids(text, add_special_tokens=False)

    def stream(self, keep_special: bool) -> "TextStream":
        return TextStream(self._tokenizer, keep_special)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"the text is not UTF-8: {error}") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _special(self, name: str) -> str:
        token = self._config.get(name) or ""
        text = token.get("content", "") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise TextError(f"tokenizer_config.json: {name} is {text!r}, not text")
        return text

    def _find_template(self, checkpoint: pathlib.Path) -> str | None:
        file = checkpoint / "chat_template.jinja"
        if file.is_file():
            return _read_text(file)
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise TextError(f"{checkpoint / 'tokenizer_config.json'}: chat_template is {template!r}, not text")
        return template


class TextStream:
    """Text of tokens that come one by one; a character of several tokens comes with its last."""

    def __init__(self, tokenizer: Tokenizer, keep_special: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=not keep_special)

    def add(self, token: int) -> str:
        return self._stream.step(self._tokenizer, token) or ""


def _read_text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TextError(f"{file}: {error}") from None


def _read_json(file: pathlib.Path) -> dict:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except ValueError as error:
        raise TextError(f"{file}: {error}") from None
    if not isinstance(value, dict):
        raise TextError(f"{file}: holds no JSON object")
    return value
