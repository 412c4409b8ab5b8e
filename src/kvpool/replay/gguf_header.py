"""The metadata of a GGUF file, without its tensors and without a package.

GGUF (ggml, docs/gguf.md): ``GGUF``, version u32, tensors u64, pairs u64; then each pair: a string
(length u64, bytes), a type u32, a value. Little-endian. Arrays are skipped but for short ones of
integers, which some models use for numbers by layer.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, Any

from .errors import TraceError

__all__ = ["read_gguf"]

# type -> (struct code, bytes); 8 is a string, 9 an array
_SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4),
    6: ("f", 4), 7: ("?", 1), 10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_MAX_PAIRS, _MAX_STRING, _MAX_KEPT = 100_000, 1 << 24, 1024
_MAX_BYTES = 1 << 28  # of all metadata: the largest vocabularies take a few megabytes


def read_gguf(path: Path) -> dict[str, Any]:
    """Keys and values; raises TraceError where the file is not what it says it is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _Reader(file, size, str(path)).pairs()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


class _Reader:
    def __init__(self, file: IO[bytes], size: int, path: str) -> None:
        self._file, self._size, self._path = file, size, path

    def pairs(self) -> dict[str, Any]:
        if self._bytes(4) != b"GGUF":
            self._fail("it does not begin with GGUF")
        version = self._number("I", 4)
        if version not in (2, 3):
            self._fail(f"GGUF version {version}, expected 2 or 3")
        self._number("Q", 8)
        n = self._number("Q", 8)
        if n > _MAX_PAIRS:
            self._fail(f"{n} pairs of metadata")
        found = {}
        for _ in range(n):
            key = self._string()
            found[key] = self._value(self._number("I", 4))
            self._check_size()
        return found

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(*_SCALARS[kind])
        if kind == 8:
            return self._string()
        if kind != 9 or depth > 2:
            self._fail(f"a value of type {kind}")
        element, n = self._number("I", 4), self._number("Q", 8)
        if element in _SCALARS:
            code, width = _SCALARS[element]
            if n <= _MAX_KEPT:
                return [self._number(code, width) for _ in range(n)]
            self._skip(n * width)
            return None
        if n > self._size:
            self._fail(f"an array of {n} elements")
        for _ in range(n):  # strings: a vocabulary
            self._check_size()
            if element == 8:
                self._skip(self._number("Q", 8))
            else:
                self._value(element, depth + 1)
        return None

    def _string(self) -> str:
        n = self._number("Q", 8)
        if n > _MAX_STRING:
            self._fail(f"a string of {n} bytes")
        return self._bytes(n).decode("utf-8", "replace")

    def _number(self, code: str, width: int) -> Any:
        return struct.unpack("<" + code, self._bytes(width))[0]

    def _bytes(self, n: int) -> bytes:
        data = self._file.read(n)
        if len(data) != n:
            self._fail("it ends in the middle of its metadata")
        return data

    def _skip(self, n: int) -> None:
        if n > self._size - self._file.tell():
            self._fail("it ends in the middle of its metadata")
        self._file.seek(n, 1)

    def _check_size(self) -> None:
        if self._file.tell() > _MAX_BYTES:  # a file with holes is long for nothing
            self._fail(f"more than {_MAX_BYTES} bytes of metadata")

    def _fail(self, why: str) -> Any:
        raise TraceError(f"{self._path}: no model file: {why}")
