# SPDX-License-Identifier: Apache-2.0
"""Work on strangers' data in a process of its own, with limits on its time and memory: nothing in this process could interrupt a
string operation of a terabyte, nor take the memory back."""
import math
import os
import resource
import select
import signal
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO, NoReturn

try:
    import ctypes

    _prctl = ctypes.CDLL(None).prctl
except ImportError:  # a Python that was built without libffi
    _prctl = None

_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
# The last byte that a process writes says how its work ended. A process that is cut off writes none of them.
_DONE, _FAILED, _NO_MEMORY = b"\xff", b"\xfe", b"\xfd"
_FRAME_BYTES = 8  # of the size before each question and answer of a Worker


class Failed(Exception):
    """What the work itself says is wrong."""


class TooSlow(Exception):
    """The work took longer than its limit."""


class TooMuchMemory(Exception):
    """The work took more memory than its limit, or than there is."""


class TooLong(Exception):
    """The work gave more bytes than its limit."""


class Died(Exception):
    """The process ended without an outcome; the text is its signal or exit code."""


def run(work: Callable[[], bytes], *, seconds: float, memory_mib: int, max_bytes: int) -> bytearray:
    """What `work` returns, done in a forked process. `memory_mib` is beside what this process has mapped. Raises Failed with
    the text of a Failed that `work` raised, TooSlow, TooMuchMemory, TooLong, Died, and OSError if no process can be started."""
    deadline = time.monotonic() + seconds

    def within_limits(pipe: BinaryIO) -> None:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, math.ceil(seconds) + 1)  # in case nobody waits any more
        _limit(resource.RLIMIT_AS, _address_space() + (memory_mib << 20))
        try:
            _write(pipe, work(), _DONE)
        except Failed as failure:
            _write(pipe, str(failure).encode(errors="surrogatepass"), _FAILED)

    return _outcome(*_do_apart(within_limits, lambda pipe: _read(pipe, deadline, max_bytes)))


def _outcome(said: bytearray, status: int) -> bytearray:
    """What was said before its last byte, which decides. `status` is of a process that has ended."""
    outcome = bytes(said[-1:])
    del said[-1:]
    if outcome == _DONE:
        return said
    if outcome == _FAILED:
        raise Failed(said.decode(errors="surrogatepass"))
    if outcome == _NO_MEMORY:
        raise TooMuchMemory
    raise Died(_ending(status))


def _ending(status: int) -> str:
    return f"exit code {status}" if status >= 0 else signal.Signals(-status).name


class Worker:
    """A process that does the same work for one question after another, where a process for each would take too long. It
    starts with the first question, and anew after one that went wrong."""

    def __init__(self, work: Callable[[bytes], bytes], *, seconds: float, memory_mib: int, max_bytes: int) -> None:
        self._work, self._seconds, self._memory_mib, self._max_bytes = work, seconds, memory_mib, max_bytes
        self._end: Callable[[], int] | None = None

    def ask(self, question: bytes) -> bytearray:
        """What `work` makes of the question, within the limits. Raises what run() raises."""
        try:
            if self._end is None:
                self._start()
            return self._answer(question)
        except Failed:
            raise
        except BaseException:
            if self._end is not None:
                self._end()
            self._end = None
            raise

    def _start(self) -> None:
        questions, self._questions = _pipe()
        self._answers, answers = _pipe()
        with questions, answers:
            parent = os.getpid()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until this process can end the child
            try:
                child = os.fork()
                if child == 0:
                    self._live(questions, answers, parent, mask)
                self._end = weakref.finalize(self, _end, child, self._questions, self._answers)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _answer(self, question: bytes) -> bytearray:
        deadline = time.monotonic() + self._seconds
        try:
            _write(self._questions, _framed(question))
            size = int.from_bytes(_read_exactly(self._answers, _FRAME_BYTES, deadline), "big")
            if size > self._max_bytes + 1:
                raise TooLong
            return _outcome(_read_exactly(self._answers, size, deadline), 0)
        except (BrokenPipeError, EOFError):
            raise Died(_ending(self._end())) from None

    def _live(self, questions: BinaryIO, answers: BinaryIO, parent: int, mask: set) -> NoReturn:
        try:
            # Whoever waits for this program to close its end of a pipe, as the decoder does, must not wait for this process.
            _close_all_but({questions.fileno(), answers.fileno()})
            _be_quiet()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends an answer, and not always the program
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _end_with(parent)
            _limit(resource.RLIMIT_CORE, 0)
            _limit(resource.RLIMIT_AS, _address_space() + (self._memory_mib << 20))
            while True:
                size = int.from_bytes(_read_exactly(questions, _FRAME_BYTES), "big")
                _write(answers, _framed(self._said(_read_exactly(questions, size))))
        finally:
            os._exit(0)

    def _said(self, question: bytes) -> bytes:
        """The answer, and behind it how the work ended."""
        try:
            return self._work(question) + _DONE
        except Failed as failure:
            return str(failure).encode(errors="surrogatepass") + _FAILED
        except MemoryError:
            return _NO_MEMORY


def _write(pipe: BinaryIO, *parts: bytes) -> None:
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[pipe.write(rest) :]


def _read(pipe: BinaryIO, deadline: float, max_bytes: int) -> bytearray:
    """All that is written, if it comes in time and has at most `max_bytes` bytes before the one that ends it."""
    said = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = pipe.read(1 << 16)
        if not part:
            return said
        said += part
        if len(said) > max_bytes + 1:
            raise TooLong
    raise TooSlow


def _read_exactly(pipe: BinaryIO, size: int, deadline: float | None = None) -> bytearray:
    """`size` bytes, if they come in time. Raises EOFError if the other end closes before."""
    said = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while len(said) < size:
        if deadline is not None and not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TooSlow
        part = pipe.read(min(size - len(said), 1 << 20))
        if not part:
            raise EOFError
        said += part
    return said


def _framed(text: bytes) -> bytes:
    return len(text).to_bytes(_FRAME_BYTES, "big") + text


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return open(reading, "rb", buffering=0), open(writing, "wb", buffering=0)


def _close_all_but(kept: set[int]) -> None:
    """Closes the files of this process, except for its standard streams and those."""
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept - {0, 1, 2}:
        try:
            os.close(descriptor)
        except OSError:
            pass  # that of the list itself


def _do_apart(work: Callable[[BinaryIO], None], attend: Callable[[BinaryIO], bytearray]) -> tuple[bytearray, int]:
    """Has a process do `work`, which writes into a pipe that `attend` reads. Returns what that returns, and the process's
    exit code, negative for a signal. The process is gone then, whatever `attend` raises."""
    parent = os.getpid()
    reader, writer = _pipe()
    with reader, writer:
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


def _end(child: int, *pipes: BinaryIO) -> int:
    """Ends a process, if it has not ended, and closes what leads to it. Returns its exit code, negative for a signal."""
    for pipe in pipes:
        pipe.close()
    try:
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except (ProcessLookupError, ChildProcessError):  # if SIGCHLD is ignored, an ended process leaves nothing
        return 0
