# SPDX-License-Identifier: Apache-2.0
"""Chat templates: programs of strangers. One is rendered in a process of its own, since nothing in this one could interrupt
a string operation of a terabyte, nor take the memory back."""
import datetime
import functools
import json
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, NoReturn

try:
    import ctypes

    _prctl = ctypes.CDLL(None).prctl
except ImportError:  # a Python built without libffi
    _prctl = None

if TYPE_CHECKING:
    import jinja2

_MAX_SECONDS = 10.0  # a conversation of a million tokens takes less than one
_MAX_MEMORY_MIB = 1024  # in addition to what the program already uses
# Limit on text added to the conversation: a million tokens, for which the tokenizer takes 1 GB and seconds.
_MAX_ADDED_BYTES = 4_000_000
_MAX_ERROR_CHARACTERS = 1000
_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h
_REMEDY = "correct it, or leave it out with --raw"
# The last byte of an output tells how the rendering ended. UTF-8 never has these bytes, so a partial output
# is not taken for a whole one.
_TEXT, _ERROR, _NO_MEMORY = b"\xff", b"\xfe", b"\xfd"


class TemplateError(Exception):
    """What is wrong with a template: a sentence about it that lacks its beginning."""


class _Refusal(Exception):
    """What a template itself says is wrong."""


def render(template: str, names: dict) -> str:
    """The text that `template` makes of `names`."""
    try:
        environment = _environment()  # made here, because each process would have to make it anew
    except ImportError as error:
        raise TemplateError(f"cannot be rendered: {error}") from None
    deadline = time.monotonic() + _MAX_SECONDS
    most = _num_bytes(names["messages"]) + _MAX_ADDED_BYTES
    try:
        said, status = _do_apart(
            lambda pipe: _write(pipe, *_outcome(environment, template, names)), lambda pipe: _read(pipe, deadline, most)
        )
    except OSError as error:
        raise TemplateError(f"cannot be rendered: no process can be started for it: {error.strerror}") from None
    outcome = bytes(said[-1:])
    if outcome == _NO_MEMORY:
        raise TemplateError(f"takes more than {_MAX_MEMORY_MIB} MiB of memory, or than there is; {_REMEDY}")
    if outcome not in (_TEXT, _ERROR):
        raise TemplateError(f"cannot be rendered: its process ended with {_ending(status)}; {_REMEDY}")
    del said[-1:]
    words = said.decode(errors="surrogatepass")  # TextModel refuses what is not UTF-8
    if outcome == _ERROR:
        raise TemplateError(words)
    return words


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


def _outcome(environment: "jinja2.Environment", template: str, names: dict) -> tuple[bytes, bytes]:
    """What to say of a rendering within limits, and the byte that ends it."""
    try:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, math.ceil(_MAX_SECONDS) + 1)  # ends the process when nobody waits for it any more
        _limit(resource.RLIMIT_AS, _address_space() + (_MAX_MEMORY_MIB << 20))
        return environment.from_string(template).render(names).encode(errors="surrogatepass"), _TEXT
    except MemoryError:
        raise
    except _Refusal as refusal:
        words = f"says: {refusal}"
    except Exception as error:  # anything that the template's expressions raise
        words = f"cannot be rendered: {str(error) or type(error).__name__}"
    if len(words) > _MAX_ERROR_CHARACTERS:
        words = f"{words[:_MAX_ERROR_CHARACTERS]} ..."
    return words.encode(errors="surrogatepass"), _ERROR


def _write(pipe: BinaryIO, *parts: bytes) -> None:
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[pipe.write(rest) :]


def _read(pipe: BinaryIO, deadline: float, most: int) -> bytearray:
    """All that is written, if it comes in time and has at most `most` bytes before the one that ends it."""
    said = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = pipe.read(1 << 16)
        if not part:
            return said
        said += part
        if len(said) > most + 1:
            raise TemplateError(f"adds more than {_MAX_ADDED_BYTES} bytes to the conversation; {_REMEDY}")
    raise TemplateError(f"takes more than {_MAX_SECONDS:g} s, its loops may have no end; {_REMEDY}")


def _do_apart(work: Callable[[BinaryIO], None], attend: Callable[[BinaryIO], bytearray]) -> tuple[bytearray, int]:
    """Has a process do `work`, which writes into a pipe that `attend` reads. Returns what that returns, and the process's
    exit code, negative for a signal. The process is gone then, whatever `attend` raises."""
    parent = os.getpid()
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader, open(writing, "wb", buffering=0) as writer:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until this process can end the child
        try:
            child = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        if child == 0:
            reader.close()  # so that writing fails once the parent has closed its end
            _work(work, writer, parent, mask)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            writer.close()
            said = attend(reader)
        finally:
            status = _end(child)
    return said, status


def _work(work: Callable[[BinaryIO], None], writer: BinaryIO, parent: int, mask: set) -> NoReturn:
    """The life of a process: says nothing but what it writes."""
    try:
        _be_quiet()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _end_with(parent)
        work(writer)
    except MemoryError:
        writer.write(_NO_MEMORY)
    finally:
        os._exit(0)


def _be_quiet() -> None:
    """Takes the standard streams, which warnings and crashes write to, and the traceback of Ctrl-C."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with(parent: int) -> None:
    """Has the kernel end this process when `parent` ends."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _limit(what: int, most: int) -> None:
    """Lowers a limit of this process to `most`, if it is not lower already."""
    limits = [limit for limit in resource.getrlimit(what) if limit != resource.RLIM_INFINITY]
    least = min([most, *limits])
    resource.setrlimit(what, (least, least))


def _address_space() -> int:
    """Bytes that this process has mapped."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _end(child: int) -> int:
    """Ends a process, if it has not ended. Returns its exit code, negative for a signal."""
    try:
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except (ProcessLookupError, ChildProcessError):  # if SIGCHLD is ignored, an ended process leaves nothing
        return 0


def _ending(status: int) -> str:
    return f"exit code {status}" if status >= 0 else signal.Signals(-status).name
