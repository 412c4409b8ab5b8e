"""Replies of Valkey and Redis (RESP 2), values straight from the socket into the caller's memory.

A client library collects a reply, cuts it into values and copies each: three copies of what a batch
carries. Here a value is received where it is wanted, and the reader knows how long it is before any
of it is taken in.

    $5 hello   a value      $-1   none      :1   a number      -ERR text   an error
"""

from __future__ import annotations

from typing import Any

__all__ = ["Replies", "ReplyError", "TooLong"]

_BUFFER_BYTES = 16 << 10
_MOST_DIGITS = 12


class ReplyError(Exception):
    """The server refused a command: given back, not raised, for more replies follow."""


class TooLong(Exception):
    """A value is longer than the memory for it. It has not been read: nothing more can be."""


class Replies:
    """The replies that come from a connected socket, one after another.

    The socket's own errors pass through; ConnectionError: it has ended; ValueError: what comes is
    no reply.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._at = self._end = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything that came has been read."""
        return self._at == self._end

    def _receive(self) -> None:
        """More bytes into the buffer; what is unread moves to its beginning."""
        left = bytes(self._view[self._at : self._end])
        self._view[: len(left)] = left
        self._at, self._end = 0, len(left)
        self._end += self._into(self._view[self._end :])

    def _into(self, view: memoryview) -> int:
        n: int = self._sock.recv_into(view)
        if n == 0:
            raise ConnectionError("the server closed the connection in a reply")
        return n

    def _line(self) -> bytes:
        while (found := self._buffer.find(b"\r\n", self._at, self._end)) < 0:
            if self._end - self._at == _BUFFER_BYTES:
                raise ValueError("a line without an end")
            self._receive()
        line = bytes(self._view[self._at : found])
        self._at = found + 2
        return line

    def number(self) -> int | ReplyError:
        """The next reply, a number."""
        line = self._line()
        if line[:1] == b"-":
            return ReplyError(line[1:].decode(errors="replace"))
        if line[:1] != b":" or not line[1:].lstrip(b"-").isdigit() or len(line) > _MOST_DIGITS:
            raise ValueError(f"expected a number, found {line[:20]!r}")
        return int(line[1:])

    def value(self, out: memoryview | None, most: int) -> memoryview | ReplyError | None:
        """The next reply, a value, in the beginning of ``out``, or in new memory of at most
        ``most`` bytes; None: there is none. TooLong."""
        line = self._line()
        if line[:1] == b"-":
            return ReplyError(line[1:].decode(errors="replace"))
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit() or len(line) > _MOST_DIGITS:
            raise ValueError(f"expected a value, found {line[:20]!r}")
        size = int(line[1:])
        if size > (most if out is None else len(out)):
            raise TooLong(f"{size} bytes")
        view = memoryview(bytearray(size)) if out is None else out[:size]
        n = min(size, self._end - self._at)
        view[:n] = self._view[self._at : self._at + n]
        self._at += n
        while n < size:
            n += self._into(view[n:])
        while self._end - self._at < 2:
            self._receive()
        if not self._buffer.startswith(b"\r\n", self._at):
            raise ValueError("a value that goes on after its end")
        self._at += 2
        return view
