"""Envelopes as streams: one block in memory at a time, whatever the envelope's size.

What can be trusted when. The checksum is the last thing of an envelope, so nothing that comes out
of a stream is verified before its end. ``StreamReader`` holds every step to the rules that can be
judged there (1, 2, 4, 5 from the header, 6 for each block) and raises ``CorruptEnvelope`` at the
end when the checksum is wrong or the stream ends early: until it has ended without an error
(``verified``), the blocks are a claim. ``import_stream`` keeps to that for a pool: it takes the
blocks at once, makes nothing findable before the end, and gives all of them back otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool import CorruptEnvelope, InvalidArgument, Pool, Unsupported, crc32c
from kvpool._core import EnvelopeHeader

from .envelope import HEADER_BYTES, RECORD_BYTES, TRAILER_BYTES, Block, Shape

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = ["MAX_BLOCK_BYTES", "StreamReader", "StreamWriter", "import_stream"]

#: The largest block that is taken from a stream by default: 256 MiB, some fifty times that of a
#: large model with 16 positions.
MAX_BLOCK_BYTES = 1 << 28


def _filler(source: Any) -> Callable[[memoryview], int]:
    """A function that fills a part of a view from a file, a socket or an iterable; 0 at the end."""
    for method in ("readinto", "recv_into"):
        read = getattr(source, method, None)
        if read is not None:
            return lambda view: read(view) or 0
    if isinstance(source, (bytes, bytearray, memoryview)):
        source = (source,)  # the whole of it; its items would be integers
    if not isinstance(source, Iterable):
        raise InvalidArgument(
            "source: expected an object with readinto or recv_into, or an iterable of bytes, "
            f"found {type(source).__name__}"
        )
    chunks: Iterator[Any] = iter(source)
    rest = memoryview(b"")

    def fill(view: memoryview) -> int:
        nonlocal rest
        while not rest:
            chunk = next(chunks, None)
            if chunk is None:
                return 0
            try:
                rest = memoryview(chunk).cast("B")
            except TypeError as error:
                raise InvalidArgument(
                    f"source: expected an iterable of bytes, found {type(chunk).__name__} in it"
                ) from error
        n = min(len(view), len(rest))
        view[:n] = rest[:n]
        rest = rest[n:]
        return n

    return fill


class StreamReader:
    """The blocks of one envelope that comes from a file, a socket, or an iterable of bytes.

    Args:
        source: an object with ``readinto`` (files, pipes, ``socket.makefile``) or ``recv_into``
            (blocking sockets), or an iterable of bytes-like chunks of any size (a gRPC stream).
        shape: what the dimensions must be, see ``Envelope``.
        max_block_bytes: a larger block is refused before memory is taken for it.
        size_bytes: the length of the whole, where it is known: rule 1 then holds to it at once.

    Iterate once. Each block's payload is a view of one buffer that the next block overwrites: copy
    what you keep. Blocks are unverified until the iteration has ended without an error; then
    ``verified`` is True and the source stands behind the envelope, so that envelopes may follow one
    another. Bytes behind the last are not looked at, but an iterable's last chunk is used up.

    Raises, here for the header and from the iteration for the rest:
        CorruptEnvelope: a broken rule, a wrong checksum, a stream that ended early.
        ShapeMismatch: the dimensions are others than ``shape``.
        Unsupported: a block larger than ``max_block_bytes``.

    Source: seed section 2.4; formats/kv-block.md.

    >>> import kvpool
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> ids = pool.alloc(3)
    >>> pool.set_fill(ids, 2)
    >>> reader = StreamReader(pool.export_iter(ids), pool)
    >>> [block.n_tokens for block in reader], reader.verified
    ([2, 2, 2], True)
    """

    def __init__(
        self,
        source: Any,
        shape: Shape = None,
        *,
        max_block_bytes: int = MAX_BLOCK_BYTES,
        size_bytes: int | None = None,
    ) -> None:
        self._fill = _filler(source)
        self._at = 0
        self._expected = HEADER_BYTES + TRAILER_BYTES
        self._crc = 0
        self._begun = False
        self.verified = False
        start = bytearray(HEADER_BYTES)
        self._read(memoryview(start))
        self.header = EnvelopeHeader(start, size_bytes)
        self.header.accept(shape)
        if self.header.n_blocks and self.header.block_bytes > max_block_bytes:
            raise Unsupported(
                f"stream: a block of {self.header.block_bytes} bytes, max_block_bytes is "
                f"{max_block_bytes}"
            )
        self._expected = self.header.size_bytes

    def _read(self, view: memoryview, *, summed: bool = True) -> None:
        filled = 0
        while filled < len(view):
            n = self._fill(view[filled:])
            if n == 0:
                raise CorruptEnvelope(
                    f"stream: ended at offset {self._at + filled}, expected {self._expected} bytes "
                    "(rule 1)"
                )
            filled += n
        self._at += filled
        if summed:
            self._crc = crc32c(view, self._crc)

    def read_into(
        self, target: Callable[[int, int, int], NDArray[np.float16]]
    ) -> Iterator[tuple[int, int, int]]:
        """As iterating, but block i's payload goes where ``target(i, hash, n_tokens)`` says.

        ``target`` gives a writable C-contiguous float16 array of ``block_bytes`` bytes: a block of
        a pool, for example, so that the bytes are copied once, by the system. Yields ``(i, hash,
        n_tokens)`` when the payload is there.
        """
        if self._begun:
            raise InvalidArgument("stream: it was iterated before")
        self._begun = True
        header, record = self.header, bytearray(RECORD_BYTES)
        for i in range(header.n_blocks):
            self._read(memoryview(record))
            header.check_records(i, 1, record, RECORD_BYTES)
            hash_ = int.from_bytes(record[:8], "little")
            n_tokens = int.from_bytes(record[8:], "little")
            payload = target(i, hash_, n_tokens)
            self._read(payload.reshape(-1).view(np.uint8).data)
            if sys.byteorder == "big":
                payload.byteswap(inplace=True)
            yield i, hash_, n_tokens
        trailer = bytearray(TRAILER_BYTES)
        self._read(memoryview(trailer), summed=False)
        header.check_crc(int.from_bytes(trailer, "little"), self._crc)
        self.verified = True

    def __iter__(self) -> Iterator[Block]:
        size, layers, heads, dim = self.header.shape
        n = self.header.n_blocks
        buffer = np.empty((layers, 2, heads, size, dim) if n else 0, np.float16)
        for i, hash_, n_tokens in self.read_into(lambda i, hash_, n_tokens: buffer):
            yield Block(i, hash_, n_tokens, buffer)


class StreamWriter:
    """Writes one envelope to a file or a socket, block after block.

    Args:
        sink: an object with ``sendall`` (sockets) or ``write`` (files), which get views that are
            good for the call only, or a function that takes bytes and may keep them.
        shape: ``(block_tokens, n_layers, n_kv_heads, head_dim)``, or a pool that has them.
        n_blocks: how many blocks follow; the header comes first and says so.

    The end of a ``with`` block writes the checksum, or nothing when an error ends it: the reader
    then sees a stream that ended early. Blocks of a pool are written faster by
    ``Pool.export_pieces`` and ``export_iter``.

    Raises:
        InvalidArgument: a dimension out of range, a size that overflows.

    Source: seed section 2.4; formats/kv-block.md.

    >>> import io
    >>> import numpy as np
    >>> file = io.BytesIO()
    >>> with StreamWriter(file, (2, 1, 1, 2), n_blocks=1) as writer:
    ...     writer.write(np.ones((1, 2, 1, 2, 2), np.float16), n_tokens=1)
    >>> from kvpool.wire import Envelope
    >>> Envelope(file.getvalue())[0].payload[0, 0].tolist()    # zeros past n_tokens
    [[[1.0, 1.0], [0.0, 0.0]]]
    """

    def __init__(self, sink: Any, shape: Shape, n_blocks: int) -> None:
        if isinstance(shape, Pool):
            shape = (shape.block_tokens, shape.n_layers, shape.n_kv_heads, shape.head_dim)
        try:
            n, dims = index(n_blocks), tuple(map(index, shape or ()))
        except TypeError:  # no integers: told below
            n, dims = -1, ()
        if len(dims) != 4 or not all(0 < d < 1 << 32 for d in dims) or not 0 <= n < 1 << 32:
            raise InvalidArgument(
                f"shape, n_blocks: expected four dimensions of at least 1 and a number of blocks, "
                f"each below 2**32, found {shape} and {n_blocks}"
            )
        head = b"TLKV" + b"\1\0\1\0" + b"".join(x.to_bytes(4, "little") for x in (n, *dims))
        try:
            self.header = EnvelopeHeader(head)
        except CorruptEnvelope as error:
            raise InvalidArgument(f"shape: an envelope of it overflows ({error})") from None
        self._send = _sender(sink)
        self._crc = self._n = 0
        self._closed = False
        self._put(head)

    def _put(self, data: Buffer) -> None:
        self._crc = crc32c(data, self._crc)
        self._send(data)

    def write(self, payload: Any, n_tokens: int | None = None, hash: int = 0) -> None:
        """The next block.

        ``payload`` is float16 ``(n_layers, 2, n_kv_heads, block_tokens, head_dim)``; ``n_tokens``
        says how many positions hold data (all, by default), and zeros are written for the others;
        ``hash`` is its name, 0 for none. Raises InvalidArgument, and nothing is written.
        """
        size, layers, heads, dim = self.header.shape
        dims = (layers, 2, heads, size, dim)
        if self._closed or self._n == self.header.n_blocks:
            raise InvalidArgument(f"write: all {self._n} blocks are written, or the end is")
        n_tokens = size if n_tokens is None else n_tokens
        block = np.asarray(payload)
        if block.dtype != np.float16 or block.shape != dims:
            raise InvalidArgument(
                f"payload: expected float16 {dims}, found {block.dtype} {block.shape}"
            )
        try:
            record = index(hash).to_bytes(8, "little") + index(n_tokens).to_bytes(4, "little")
        except (TypeError, OverflowError) as error:
            raise InvalidArgument(
                "hash, n_tokens: expected integers of 64 and 32 bits, "
                f"found {hash!r} and {n_tokens!r}"
            ) from error
        try:
            self.header.check_records(self._n, 1, record, RECORD_BYTES)
        except CorruptEnvelope as error:
            raise InvalidArgument(str(error)) from None
        if n_tokens < size:
            block = block.copy()
            block[:, :, :, n_tokens:] = 0
        self._put(record)
        self._put(np.ascontiguousarray(block, "<f2").reshape(-1).view(np.uint8).data)
        self._n += 1

    def close(self) -> None:
        """Writes the checksum. InvalidArgument when blocks are missing. The sink stays open."""
        if self._closed:
            return
        if self._n != self.header.n_blocks:
            raise InvalidArgument(f"close: {self._n} of {self.header.n_blocks} blocks are written")
        self._closed = True
        self._send(self._crc.to_bytes(4, "little"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is None:
            self.close()
        self._closed = True


def _sender(sink: Any) -> Callable[[Any], Any]:
    if hasattr(sink, "sendall"):
        send: Callable[[Any], Any] = sink.sendall
        return send
    write = getattr(sink, "write", None)
    if write is None and callable(sink):  # what it gets may be a pool's memory: it gets a copy
        return lambda data: sink(bytes(data))
    if write is None:
        raise InvalidArgument(
            f"sink: expected an object with sendall or write, found {type(sink).__name__}"
        )

    def put(data: Any) -> None:
        view = memoryview(data)
        while len(view):  # a raw file may take a part of it
            n = write(view)
            view = view[len(view) if n is None else n :]

    return put


def import_stream(pool: Pool, source: Any, *, size_bytes: int | None = None) -> NDArray[np.uint32]:
    """``Pool.import_`` from a stream: the payloads go from the source into the blocks.

    Returns the block ids, uint32 ``(n_blocks,)``, in the order of the envelope. All blocks are
    taken when the header is read, named ones are registered after the checksum was right, and when
    anything goes wrong before that, the source's own errors included, every block is given back.
    Cached blocks that were evicted to make room are not brought back: validate first
    (``EnvelopeFile.verify``) where that matters. Not for a pool with a ``BlockManager``: see
    ``BlockManager.load``.

    Raises:
        CorruptEnvelope, ShapeMismatch: as ``StreamReader``.
        PoolFull: fewer blocks are free or cached; nothing was taken.

    Source: seed section 2.4; formats/kv-block.md.

    >>> import kvpool
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> ids = pool.alloc(1)
    >>> pool.set_fill(ids, 1)
    >>> import_stream(pool, [pool.export(ids)])
    array([1], dtype=uint32)
    """
    reader = StreamReader(source, pool, size_bytes=size_bytes)
    ids = pool.alloc(reader.header.n_blocks)
    try:
        fills: list[int] = []
        named: dict[int, int] = {}
        for i, hash_, n_tokens in reader.read_into(lambda i, *_: pool.block(ids[i])):
            fills.append(n_tokens)
            if hash_:
                named[i] = hash_
        pool.set_fill(ids, fills)
        pool.register(ids[list(named)], list(named.values()))
    except BaseException:
        pool.unref(ids)
        raise
    return ids
