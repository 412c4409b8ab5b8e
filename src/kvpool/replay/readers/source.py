"""Bytes of a trace, in pieces of whole lines: plain, gzip or zstd, by what the file begins with."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import MissingPackage, TraceError

__all__ = ["Piece", "Problems", "Source"]

_PIECE_BYTES = 1 << 20
_MAX_LINE = 1 << 28  # a line longer than this is no line: keeps memory bounded


class Piece(NamedTuple):
    """Whole lines; ``line`` is the number of the first one, from 1."""

    data: bytes
    line: int


class Problems:
    """Lines that are not right: an error at once, or counted with the first few kept.

    >>> problems = Problems(skip=True)
    >>> problems.add("a.jsonl", 7, "no input_length")
    >>> problems.count, problems.first
    (1, ['a.jsonl:7: no input_length'])
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: list[str] = []

    def add(self, path: str, line: int, why: str) -> None:
        """Raises TraceError, or counts the line."""
        text = f"{path}:{line}: {why}"
        if not self.skip:
            raise TraceError(f"{text} (--skip-bad leaves such lines out)")
        self.count += 1
        if len(self.first) < 5:
            self.first.append(text)


class Source:
    """An open file: ``pieces`` gives its lines, ``position`` and ``size`` how far that is in bytes.

    ``path`` "-" is standard input. ``size`` is None where it cannot be known. ``index``: which of
    several files it is.
    """

    def __init__(self, path: str, index: int = 0) -> None:
        self.path, self.index = path, index
        self.size: int | None = None
        try:
            if path == "-":
                if sys.stdin is None:
                    raise TraceError("-: stdin is closed")
                self._raw: IO[bytes] = sys.stdin.buffer
            else:
                self._raw = Path(path).open("rb")  # noqa: SIM115 (closed by close)
                self.size = Path(path).stat().st_size or None
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from error
        self._counted = _Counted(self._raw)
        buffered: Any = io.BufferedReader(self._counted, 1 << 18)
        try:
            self._file: Any = _decompressed(buffered, path)
        except OSError as error:
            self.close()
            raise TraceError(f"{path}: {error.strerror or error}") from error
        except MissingPackage:
            self.close()
            raise

    @property
    def position(self) -> int:
        """Bytes of the file that were read: compressed ones."""
        return self._counted.position

    def pieces(self, piece_bytes: int = _PIECE_BYTES) -> Iterator[Piece]:
        """All lines, in pieces of about ``piece_bytes``."""
        line, held = 1, 0
        rest: list[bytes] = []  # of a line that has not ended yet
        while True:
            try:
                data = self._file.read(piece_bytes)
            except (OSError, EOFError, zlib.error, _zstd_error()) as error:
                raise TraceError(f"{self.path}:{line}: cannot be read: {error}") from error
            if not data:
                break
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                rest.append(data)
                held += len(data)
                if held > _MAX_LINE:
                    raise TraceError(f"{self.path}:{line}: a line of more than {_MAX_LINE} bytes")
                continue
            whole = b"".join([*rest, data[:cut]])
            rest, held = [data[cut:]], len(data) - cut
            yield Piece(whole, line)
            line += whole.count(b"\n")
        last = b"".join(rest)
        if last.strip():
            yield Piece(last, line)

    def close(self) -> None:
        """Closes the file, if it is not standard input."""
        if self.path != "-":
            self._raw.close()


class _Counted(io.RawIOBase):
    """Reads through, and counts."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self.position = raw, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def _decompressed(file: Any, path: str) -> Any:
    magic = file.peek(4)[:4]
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file)
    if magic == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError as error:
            raise MissingPackage.of("zstandard", f"{path}: zstd files") from error
        return _Zstd(file, zstandard)
    return file


class _Zstd:
    """A zstd file that says so where it was cut: the package takes that for the end.

    A frame of our own is read behind the file, a line of spaces that no format minds. It comes out
    only when the last frame before it is whole.
    """

    _MARK = b"\n" + 30 * b" " + b"\n"

    def __init__(self, file: Any, zstandard: Any) -> None:
        both = _Then(file, io.BytesIO(zstandard.compress(self._MARK)))
        self._frames = zstandard.ZstdDecompressor().stream_reader(both, read_across_frames=True)
        self._tail = b""

    def read(self, n: int) -> bytes:
        data: bytes = self._frames.read(n)
        if not data and self._tail != self._MARK:
            raise EOFError("it ends within a zstd frame")
        self._tail = (self._tail + data[-len(self._MARK) :])[-len(self._MARK) :]
        return data


class _Then:
    """One file, and then another."""

    def __init__(self, *files: Any) -> None:
        self._files = list(files)

    def read(self, n: int) -> bytes:
        while self._files:
            data: bytes = self._files[0].read(n)
            if data:
                return data
            del self._files[0]
        return b""


def _zstd_error() -> type[BaseException]:
    module = sys.modules.get("zstandard")
    return module.ZstdError if module is not None else EOFError
