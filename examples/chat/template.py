# SPDX-License-Identifier: Apache-2.0
"""Chat templates: programs of strangers. One is rendered in a process of its own."""
import datetime
import functools
import json
from typing import TYPE_CHECKING

import apart

if TYPE_CHECKING:
    import jinja2

_MAX_SECONDS = 10.0  # a conversation of a million tokens takes less than one
_MAX_MEMORY_MIB = 1024  # beside what the program has already
_MAX_ADDED_BYTES = 4_000_000  # to the conversation: a million tokens
_MAX_ERROR_CHARACTERS = 1000
_REMEDY = "correct it, or leave it out with --raw"


class TemplateError(Exception):
    """What is wrong with a template: a sentence about it that lacks its beginning."""


class _Refusal(Exception):
    """What a template itself says is wrong."""


def render(template: str, names: dict) -> str:
    """The text that `template` makes of `names`."""
    try:
        environment = _environment()  # here: a process would have to make it each time
    except ImportError as error:
        raise TemplateError(f"cannot be rendered: {error}") from None
    try:
        text = apart.run(
            lambda: _outcome(environment, template, names),
            seconds=_MAX_SECONDS,
            memory_mib=_MAX_MEMORY_MIB,
            max_bytes=_num_bytes(names["messages"]) + _MAX_ADDED_BYTES,
        )
    except OSError as error:
        raise TemplateError(f"cannot be rendered: no process can be started for it: {error.strerror}") from None
    except apart.Failed as failure:
        raise TemplateError(str(failure)) from None
    except apart.TooSlow:
        raise TemplateError(f"takes more than {_MAX_SECONDS:g} s, its loops may have no end; {_REMEDY}") from None
    except apart.TooMuchMemory:
        raise TemplateError(f"takes more than {_MAX_MEMORY_MIB} MiB of memory, or than there is; {_REMEDY}") from None
    except apart.TooLong:
        raise TemplateError(f"adds more than {_MAX_ADDED_BYTES} bytes to the conversation; {_REMEDY}") from None
    except apart.Died as ending:
        raise TemplateError(f"cannot be rendered: its process ended with {ending}; {_REMEDY}") from None
    return text.decode(errors="surrogatepass")  # TextModel refuses what is not UTF-8


def _num_bytes(messages: list[dict]) -> int:
    """Of what was said."""
    return sum(len(str(part).encode(errors="surrogatepass")) for message in messages for part in message.values())


@functools.cache
def _environment() -> "jinja2.Environment":
    """What chat templates are written for: Jinja with the names, the filter and the tag that transformers adds."""
    import jinja2  # not needed for prompts without a template
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what an assistant says, for training."""

        tags = {"generation"}

        def parse(self, parser: "jinja2.parser.Parser") -> "jinja2.nodes.Node":
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise _Refusal(message)

    def to_json(value: object, ensure_ascii: bool = False, **options: object) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes HTML

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.from_string("").render()  # makes Jinja create what it caches
    return environment


def _outcome(environment: "jinja2.Environment", template: str, names: dict) -> bytes:
    """The rendered text. Raises apart.Failed with what to say of a template that cannot be rendered."""
    try:
        return environment.from_string(template).render(names).encode(errors="surrogatepass")
    except MemoryError:
        raise
    except _Refusal as refusal:
        words = f"says: {refusal}"
    except Exception as error:  # whatever the template's own expressions raise
        words = f"cannot be rendered: {str(error) or type(error).__name__}"
    if len(words) > _MAX_ERROR_CHARACTERS:
        words = f"{words[:_MAX_ERROR_CHARACTERS]} ..."
    raise apart.Failed(words)
