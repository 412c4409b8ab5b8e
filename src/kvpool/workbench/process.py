"""Runs other people's programs: with a time limit, a bound on their output, and no way to hang us.

A learner's pool loops for ever, a driver prints without end, a test forks and leaves its child
behind. Each program runs in a process group of its own that is killed as a whole, and what it
prints is cut at a limit. Who leaves the group (setsid) is found by a mark in the environment that
children inherit, where there is a /proc to look in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["Finished", "run"]

_OUTPUT_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True)
class Finished:
    """How a program ended and what it printed.

    ``code`` is its exit code, negative for the signal that killed it, as in ``subprocess``.
    ``timed_out`` says that it was our time limit, ``flooded`` that it printed more than the limit;
    both mean that it was killed.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    flooded: bool = False

    def ending(self) -> str:
        """The end in words: ``exit code 3``, ``killed by SIGSEGV``, ``no end after 5 s``."""
        if self.timed_out:
            return f"no end after {self.seconds:.0f} s"
        if self.flooded:
            return f"stopped after {_OUTPUT_LIMIT_BYTES >> 20} MiB of output"
        if self.code < 0:
            try:
                return f"killed by {signal.Signals(-self.code).name}"
            except ValueError:
                return f"killed by signal {-self.code}"
        return f"exit code {self.code}"


class _Reader(threading.Thread):
    """Drains one pipe; calls ``flood`` once when it gives more than the limit."""

    def __init__(
        self, pipe: IO[bytes], flood: Callable[[], None], on_line: Callable[[str], None] | None
    ) -> None:
        super().__init__(daemon=True)
        self._pipe, self._flood, self._on_line = pipe, flood, on_line
        self._parts: list[bytes] = []
        self._size = 0

    def run(self) -> None:
        pending = b""
        while chunk := os.read(self._pipe.fileno(), 1 << 16):
            room = _OUTPUT_LIMIT_BYTES - self._size
            if room > 0:
                self._parts.append(chunk[:room])
            self._size += len(chunk)
            if room >= 0 and self._size > _OUTPUT_LIMIT_BYTES:
                self._flood()
            if self._on_line is not None and room > 0:
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._on_line(line.decode("utf-8", "replace"))

    def text(self) -> str:
        return b"".join(self._parts).decode("utf-8", "replace")


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    merge: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    daemons: bool = False,
    on_line: Callable[[str], bool | None] | None = None,
) -> Finished:
    """Runs ``command`` to its end, or to ours.

    ``merge`` sends stderr where stdout goes. ``env`` is added to the environment. ``daemons``
    spares what left the process group: a compiler may start the server of its cache. ``on_line``
    sees each line of stdout as it comes and stops the program by answering True.

    Raises ``OSError`` when the program cannot be started; never for how it ends.
    """
    start = time.monotonic()
    mark = f"OL_RUN_{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [os.fspath(word) for word in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merge else subprocess.PIPE,
        env={**os.environ, **(env or {}), mark: "1"},
        cwd=cwd,
        start_new_session=True,
    )
    flooded = threading.Event()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself in between
            os.killpg(process.pid, signal.SIGKILL)

    def flood() -> None:
        flooded.set()
        kill()

    def watch(line: str) -> None:
        if on_line is not None and on_line(line):
            kill()

    assert process.stdin is not None
    assert process.stdout is not None
    readers = [_Reader(process.stdout, flood, None if on_line is None else watch)]
    if process.stderr is not None:
        readers.append(_Reader(process.stderr, flood, None))
    for reader in readers:
        reader.start()
    feeder = threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True)
    feeder.start()

    timed_out = False
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        kill()  # whatever is left of its group, also when we are interrupted
        if not daemons:
            _kill_marked(f"{mark}=1".encode())
        process.wait()
    for thread in [feeder, *readers]:
        thread.join(timeout=5)
    process.stdout.close()
    if process.stderr is not None:
        process.stderr.close()
    return Finished(
        code=process.returncode,
        stdout=readers[0].text(),
        stderr=readers[1].text() if len(readers) > 1 else "",
        seconds=time.monotonic() - start,
        timed_out=timed_out,
        flooded=flooded.is_set(),
    )


def _kill_marked(mark: bytes) -> None:
    """Kills our processes with this in their environment, until there are none: they may fork."""
    for _ in range(100):
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # not ours, or gone
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return


def _feed(pipe: IO[bytes], data: bytes) -> None:
    try:
        pipe.write(data)
        pipe.close()
    except OSError:
        pass  # the program ended, or closed its stdin, before it read all of it
