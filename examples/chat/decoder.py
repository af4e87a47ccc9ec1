# SPDX-License-Identifier: Apache-2.0
"""helix-decode --serve as a process: requests in, tokens out."""
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class DecoderError(Exception):
    """What the decoder said is wrong, in one line."""


@dataclass
class Answer:
    """How a request ended."""

    reason: str = ""
    usage: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)


class Decoder:
    """Starts the program and speaks its lines of JSON. Use as a context manager; one request at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._said = tempfile.TemporaryFile()
        try:
            # The decoder gets a session of its own, because Ctrl-C must stop an answer and not the decoder.
            self._process = subprocess.Popen(
                [*command, "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
            )
        except OSError as error:
            raise DecoderError(f"{command[0]} cannot be started: {error.strerror}") from None
        self._count = 0
        self._running: str | None = None  # the request that cancel() ends
        self._is_sending = False
        self._cancel_is_due = False
        self.abilities: dict = {}

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()  # nobody waits for what it still loads or computes
        self.close()

    def wait_until_ready(self) -> list[str]:
        """Returns once the weights are loaded, with the decoder's warnings. Raises DecoderError if they cannot be."""
        self.abilities = self._next_event()
        return [line for line in self._words().splitlines() if line.startswith("warning: ")]

    def complete(self, prompt: Sequence[int], answer: Answer, **settings: object) -> Iterator[int]:
        """Yields tokens as they are drawn; `answer` is filled in after the last one."""
        self._count += 1
        name = str(self._count)
        given = {key: value for key, value in settings.items() if value is not None}
        try:
            self._send({"id": name, "prompt": list(prompt), **given})
            self._running = name
            self._send_cancel_if_due()
            while True:
                event = self._next_event()
                if event.get("id") != name:
                    continue
                if event["event"] == "error":
                    raise DecoderError(event["message"])
                if event["event"] == "end":
                    answer.reason, answer.usage, answer.timing = event["reason"], event["usage"], event["timing"]
                    return
                yield event["token"]
        finally:
            self._running = None
            self._cancel_is_due = False

    def stats(self) -> dict:
        """What is in use."""
        self._send({"stats": True})
        while True:
            event = self._next_event()
            if event["event"] == "stats":
                return event

    def cancel(self) -> None:
        """Ends the request that runs, or the next one; its end event still comes.

        A signal handler may call it at any time: while a request is being sent, the cancellation follows it.
        """
        self._cancel_is_due = True
        self._send_cancel_if_due()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Lets the decoder finish."""
        try:
            self._process.stdin.close()
        except OSError:
            pass  # the process is gone
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def _send_cancel_if_due(self) -> None:
        if self._cancel_is_due and self._running is not None and not self._is_sending:
            self._cancel_is_due = False
            self._send({"cancel": self._running})

    def _send(self, command: dict) -> None:
        self._is_sending = True
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise DecoderError(self._last_words()) from None
        finally:
            self._is_sending = False

    def _next_event(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise DecoderError(self._last_words())
        try:
            return json.loads(line)
        except ValueError:
            said = line.decode(errors="replace").strip()
            raise DecoderError(f"the decoder does not serve but prints {said!r}; leave out options that only print") from None

    def _words(self) -> str:
        """What the decoder has written to its standard error."""
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), size, 0).decode(errors="replace").strip()

    def _last_words(self) -> str:
        """Why the decoder ended, from its standard error."""
        code = self._process.wait()
        if code == 0:
            return "the decoder ended without an error before it served; leave out options that only print"
        said = self._words()
        return said.splitlines()[-1] if said else f"the decoder ended with exit code {code}"
