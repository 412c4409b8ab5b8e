"""
The compiled part of kvpool: Pool and the functions of the wire format. Import them from kvpool.
"""

from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Sequence as Row
)
from os import PathLike
from typing import (
    Any,
    Literal,
    NoReturn,
    SupportsIndex,
    TypeAlias,
    overload
)

import numpy
from numpy.typing import NDArray
from typing_extensions import Buffer, Self

from kvpool._manager import BlockEvent, Fit, ManagerStats
from kvpool._stats import Stats
from kvpool.tiers import Tier, TierStack


Int: TypeAlias = int | numpy.integer[Any]
Array: TypeAlias = Row[int] | Row[numpy.integer[Any]] | NDArray[numpy.integer[Any]]
Ints: TypeAlias = Int | Array

abi_version: int = 1

class Pool:
    """
    A slab of KV cache blocks with reference counts, a prefix index and a wire format.

    A block holds K and V of ``block_tokens`` consecutive positions, for every layer and KV head, as
    float16 ``(n_layers, 2, n_kv_heads, block_tokens, head_dim)``: index 0 of the second axis is K,
    1 is V. Every block is free, used (held by somebody) or cached (held by nobody, but findable under
    the hash it is registered with, until its memory is needed).

    Args:
        n_blocks: blocks in the pool, at least 1.
        block_tokens: token positions in a block, at least 1.
        n_layers, n_kv_heads, head_dim: the model's dimensions, each at least 1.
        touch: touch every page of the slab now: slow to create, no page faults later.
        huge_pages: advise the system to back the slab with huge pages.
        slab: memory of yours to put the values in: a writable C-contiguous buffer (NumPy array, mmap,
            shared memory) of float16 values or bytes, at least ``n_blocks * block_bytes`` long. It is
            used in place, and held until the pool and its last view are gone; resize nothing that a
            pool lies in. Two pools must not share a slab.
        copy: makes this a pool of ids, whose values are elsewhere: on a device, or in another layout
            (``kvpool.integrations.torch`` is one). ``copy(sources, destinations)``, two uint32 arrays
            of equal length, is called wherever a pool with a slab copies blocks: before ``cow``, and
            before an append of a ``BlockManager`` or ``Sequence``, returns. It may give the GIL up, and
            is called by one thread at a time, in order; within a call no source is a destination, so
            that all can be copied at once. The blocks are held meanwhile. If it raises,
            so does the call, which has happened all the same; the blocks stay held, and the next such
            call makes the copy first.

    The slab takes ``n_blocks * block_bytes`` bytes of address space at once, and memory as its pages
    are first touched; its contents are undefined until they are written.

    Scalars in, scalars out; arrays in, arrays out. Ids and hashes may be ints, lists, tuples, ranges or
    1-D arrays of any integer dtype. A call that raises has changed nothing. All methods may be called
    from many threads at once: one lock a pool, waited for without the GIL, which is also released
    while bulk bytes are copied. The values behind ``block`` and ``slab`` are not locked: only a holder
    with the only reference to an unregistered block may write it.

    ``close`` (or the end of a ``with`` block) ends the pool; views stay valid, and the memory is given
    back with the last of them. A pool cannot be pickled or copied: blocks move as ``export`` bytes. It
    belongs to the process that made it: in a child of ``os.fork`` every call raises ``Unsupported``.

    Raises:
        InvalidArgument: a dimension is 0 or too large, or the slab's size overflows; ``slab`` is too
            short or no such buffer, ``copy`` no function, or both are given.
        MemoryError: the slab or the records cannot be had; nothing is leaked.

    Source: seed section 2.1; Kwon et al., Efficient Memory Management for Large Language Model Serving
    with PagedAttention (SOSP 2023), sections 4.1 to 4.4.

    >>> pool = kvpool.Pool(n_blocks=4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> pool
    Pool(n_blocks=4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2; free=4, used=0, cached=0, evictions=0)
    >>> with pool:
    ...     id = pool.alloc()
    ...     pool.block(id).shape
    (1, 2, 1, 2, 2)
    >>> pool.closed
    True
    """

    def __init__(self, n_blocks: Int, block_tokens: Int = 16, *, n_layers: Int, n_kv_heads: Int, head_dim: Int, touch: bool = False, huge_pages: bool = True, slab: Buffer | NDArray[Any] | None = None, copy: Callable[[NDArray[numpy.uint32], NDArray[numpy.uint32]], object] | None = None) -> None: ...

    @overload
    def alloc(self, n: None = None) -> int:
        """
        Takes ``n`` blocks, or one when ``n`` is left out: all or nothing.

        Returns uint32 ``(n,)``, or an int without ``n``. Each block has one reference and fill 0; its
        contents are undefined. Free blocks are taken first, then cached ones, the least recently used
        first: those are evicted, which unregisters them and counts in ``stats.evictions``.

        Raises:
            PoolFull: fewer than ``n`` blocks are free or cached; the text has the numbers.
            InvalidArgument: ``n`` is no integer from 0 to 2**32 - 1, or the pool is closed.

        Source: seed section 2.1.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> pool.alloc()
        0
        >>> pool.alloc(3)
        array([1, 2, 3], dtype=uint32)
        """
    @overload
    def alloc(self, n: Int) -> NDArray[numpy.uint32]: ...

    def ref(self, ids: Ints) -> None:
        """
        Adds one reference to each block: a fork does this to every block of its parent.

        An id that appears k times gets k references.

        Raises:
            InvalidArgument: an id is out of range or nobody holds the block (or it has 2**32 - 1
                references); the text names the position, and no block has changed.

        Source: seed section 2.2.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> ids = pool.alloc(2)
        >>> pool.ref(ids)
        >>> pool.refs(ids)
        array([2, 2], dtype=uint32)
        """

    def unref(self, ids: Ints) -> None:
        """
        Takes one reference from each block.

        A block without references becomes cached when it is registered, else free. An id that appears k
        times loses k references: ``unref([b, b])`` on a block with one is an error that changes nothing.

        Raises:
            InvalidArgument: an id is out of range, nobody holds the block, or it is mentioned more often
                than it has references; the text names the position, and no block has changed.

        Source: seed section 2.1.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> ids = pool.alloc(2)
        >>> pool.unref(ids)
        >>> pool.unref(int(ids[0]))
        Traceback (most recent call last):
        kvpool.errors.InvalidArgument: tl_kv_unref: nobody holds block 0
        """

    @overload
    def refs(self, ids: Int) -> int:
        """
        How many references each block has: 0 for free and cached blocks.

        Returns an int for one id, uint32 ``(n,)`` for a row.

        Raises:
            InvalidArgument: an id is out of range.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> id = pool.alloc()
        >>> pool.refs(id), pool.refs([0, 1])
        (1, array([1, 0], dtype=uint32))
        """
    @overload
    def refs(self, ids: Array) -> NDArray[numpy.uint32]: ...

    @overload
    def cow(self, ids: Int) -> int:
        """
        Makes blocks that the caller may write: copy on write.

        With one reference a block is returned as it is. With more, a new block gets the contents and the
        fill, the caller's reference moves to it from the original, and the copy, which is not registered,
        is returned. Returns an int for one id; for a row uint32 ``(n,)``, as if the ids were given one by
        one, but all or nothing. A registered block at one reference comes back as itself and must not be
        written: whoever has to change one allocates, copies and unrefs the original.

        Raises:
            PoolFull: there is no room for the copies.
            InvalidArgument: an id is out of range or nobody holds the block.

        Source: seed section 2.2.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> id = pool.alloc()
        >>> pool.cow(id)                 # the only holder writes in place
        0
        >>> pool.ref(id)                 # a fork ...
        >>> pool.cow(id)                 # ... writes into a copy
        1
        >>> pool.refs([0, 1])
        array([1, 1], dtype=uint32)
        """
    @overload
    def cow(self, ids: Array) -> NDArray[numpy.uint32]: ...

    @overload
    def set_fill(self, ids: Int, n_tokens: Int) -> None:
        """
        Says how many positions of each block hold data: 0 to ``block_tokens``.

        ``n_tokens`` is one number for all, or one for each id. Positions past the fill are exported as
        zeros, and only full blocks can be registered.

        Raises:
            InvalidArgument: a fill is above ``block_tokens``, a block is registered (and thus immutable),
                nobody holds it, an id is out of range, or the lengths differ; no block has changed.

        Source: seed section 2.1.

        >>> pool = kvpool.Pool(4, block_tokens=16, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> ids = pool.alloc(2)
        >>> pool.set_fill(ids, [16, 3])
        >>> pool.fill(ids)
        array([16,  3], dtype=uint32)
        """
    @overload
    def set_fill(self, ids: Array, n_tokens: Ints) -> None: ...

    @overload
    def fill(self, ids: Int) -> int:
        """
        How many positions of each block hold data.

        Returns an int for one id, uint32 ``(n,)`` for a row.

        Raises:
            InvalidArgument: an id is out of range.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> pool.fill(pool.alloc())
        0
        """
    @overload
    def fill(self, ids: Array) -> NDArray[numpy.uint32]: ...

    @overload
    def register(self, ids: Int, hashes: Int) -> bool:
        """
        Makes full blocks findable under their hashes, and immutable from now on.

        Returns True when the block carries the hash afterwards, False when another block holds that hash:
        the normal answer when two requests computed equal blocks; the block stays a private copy. For rows:
        bool ``(n,)``, in order, all or nothing. Write the values before registering them.

        Raises:
            InvalidArgument: a hash is 0, a block is not full, nobody holds it, it is registered under
                another hash, an id is out of range, or the lengths differ; nothing was registered.

        Source: seed section 2.3.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> ids = pool.alloc(2)
        >>> pool.set_fill(ids, 2)
        >>> h = kvpool.block_hash(0, [1, 2])
        >>> pool.register(ids, [h, h])
        array([ True, False])
        """
    @overload
    def register(self, ids: Array, hashes: Array) -> NDArray[numpy.bool_]: ...

    @overload
    def hash(self, ids: Int) -> int | None:
        """
        The hash each block is registered under.

        Returns an int, or None for a block without one; for a row uint64 ``(n,)`` with 0 for none.

        Raises:
            InvalidArgument: an id is out of range.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> id = pool.alloc()
        >>> pool.hash(id) is None
        True
        >>> pool.set_fill(id, 2)
        >>> pool.register(id, 7)
        True
        >>> pool.hash([id, 1])
        array([7, 0], dtype=uint64)
        """
    @overload
    def hash(self, ids: Array) -> NDArray[numpy.uint64]: ...

    @overload
    def lookup(self, hashes: Int) -> int | None:
        """
        Finds registered blocks by hash and takes a reference on each one found.

        Returns the block's id, or None for a miss, which is the normal answer for a new prompt. For a row:
        int64 ``(n,)`` with -1 for misses; each hash is looked up, also behind a miss. A cached block is
        used again afterwards, with its contents intact. Hash 0 is a miss. The hash of the format can be
        collided on purpose: compare the tokens before trusting a hit from outside.

        Raises:
            InvalidArgument: a hash is no integer from 0 to 2**64 - 1, or a block has 2**32 - 1 references;
                no reference was taken.

        Source: seed section 2.3.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> id = pool.alloc()
        >>> pool.set_fill(id, 2)
        >>> pool.register(id, 7)
        True
        >>> pool.unref(id)               # cached from now on
        >>> pool.lookup(7), pool.lookup(8)
        (0, None)
        >>> pool.lookup([7, 8])
        array([ 0, -1])
        >>> pool.refs(0)
        2
        """
    @overload
    def lookup(self, hashes: Array) -> NDArray[numpy.int64]: ...

    def block(self, id: Int) -> NDArray[numpy.float16]:
        """
        A view of one block's values: no copy, writable.

        Returns float16 ``(n_layers, 2, n_kv_heads, block_tokens, head_dim)``, C-contiguous; index 0 of the
        second axis is K, 1 is V. The view keeps the memory alive, also after ``close``. It is a NumPy
        array: the buffer protocol and DLPack hand it on without a copy. Its values mean something while the
        caller holds the block, and may be written by a holder with the only reference to an unregistered
        block; nothing checks that here.

        Raises:
            InvalidArgument: the id is out of range, or the pool is closed.
            Unsupported: a pool of ids.

        Source: seed section 2.1 (the layout of the slab).

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> id = pool.alloc()
        >>> k, v = pool.block(id)[0]     # layer 0
        >>> k[:] = 1.0                   # (n_kv_heads, block_tokens, head_dim)
        >>> bool((pool.slab[id, 0, 0] == 1.0).all())
        True
        """

    @property
    def slab(self) -> NDArray[numpy.float16]:
        """
        A view of all blocks' values: no copy, writable.

        float16 ``(n_blocks, n_layers, 2, n_kv_heads, block_tokens, head_dim)``, C-contiguous. Index it with
        an array of ids to gather a sequence's blocks. The rules of ``block`` hold.

        Raises:
            InvalidArgument: the pool is closed.
            Unsupported: a pool of ids.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> ids = pool.alloc(3)
        >>> pool.slab[ids, 0, 0].shape   # K of layer 0: (blocks, n_kv_heads, block_tokens, head_dim)
        (3, 1, 2, 4)
        """

    def export(self, ids: Array) -> bytes:
        """
        Writes held blocks into an envelope: bytes that another process can import.

        ``ids`` is a row, in the order of the sequence; an id may appear more than once. The envelope has
        each block's hash, fill and values, with zeros past the fill, and a CRC-32C; it is a function of
        the blocks' data alone. The GIL is released for large ones.

        Raises:
            InvalidArgument: an id is out of range, nobody holds the block, or its fill is 0.
            Unsupported: a pool of ids.
            MemoryError: no memory for the bytes.

        Source: seed section 2.4; formats/kv-block.md.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> ids = pool.alloc(1)
        >>> pool.set_fill(ids, 1)
        >>> pool.export(ids)[:4], len(pool.export(ids)) == pool.export_bytes(1)
        (b'TLKV', True)
        """

    def export_bytes(self, n: Int) -> int:
        """
        The size in bytes of an envelope of ``n`` blocks: 28 + n * (12 + block_bytes) + 4.

        Raises:
            InvalidArgument: ``n`` is no integer from 0 to 2**32 - 1, or the size overflows 64 bits.

        Source: seed section 2.4.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> pool.export_bytes(1)
        60
        """

    def import_(self, buffer: Buffer | NDArray[Any]) -> NDArray[numpy.uint32]:
        """
        Takes blocks for an envelope, copies its values in and registers its full blocks.

        ``buffer`` is anything with a C-contiguous buffer (bytes, bytearray, memoryview, mmap, a NumPy
        array), read in place; the GIL is released for large ones. Returns uint32 ``(n,)``: the blocks in
        the envelope's order, one reference each. A hash that another block holds already leaves the new
        block a private copy. The envelope is checked whole first: a refused one changes nothing at all.

        Raises:
            CorruptEnvelope: wrong length, magic, checksum, version, dtype, or an illegal block record.
            ShapeMismatch: block_tokens, n_layers, n_kv_heads or head_dim differ from the pool's.
            PoolFull: fewer blocks are free or cached than it holds.
            InvalidArgument: the buffer is not contiguous, in the pool's own slab, or no buffer at all.
            Unsupported: a pool of ids.

        Source: seed section 2.4; formats/kv-block.md.

        >>> a = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> b = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> ids = a.alloc(2)
        >>> a.set_fill(ids, [2, 1])
        >>> a.register(int(ids[0]), 7)
        True
        >>> arrived = b.import_(a.export(ids))
        >>> b.hash(arrived), b.fill(arrived)
        (array([7, 0], dtype=uint64), array([2, 1], dtype=uint32))
        """

    def check(self) -> None:
        """
        Compares everything the pool stores twice, and raises at the first disagreement.

        Every block in exactly one state, the free list without duplicates, the LRU list, the index against
        the records in both directions, fills and counts. For tests and debugging; O(n_blocks).

        Raises:
            KvPoolError: the pool disagrees with itself: a bug in the library, or a stray write.
            InvalidArgument: the pool is closed.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> pool.check()
        """

    def close(self) -> None:
        """
        Ends the pool; again is allowed, and does nothing.

        Waits for the call that is under way in another thread, and ends the pool's BlockManager with all of
        its sequences. Every later operation raises
        ``InvalidArgument``; the configuration can still be read. Views stay valid and keep the memory; it
        is given back with the last view, at once when there is none.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> view = pool.block(0)
        >>> pool.close()
        >>> view[:] = 1.0
        >>> pool.alloc()
        Traceback (most recent call last):
        kvpool.errors.InvalidArgument: the pool is closed
        """

    @property
    def stats(self) -> Stats:
        """
        Stats(free, used, cached, evictions): blocks in each state, counted in O(1).

        Raises:
            InvalidArgument: the pool is closed.

        >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
        >>> pool.stats.free
        4
        """

    @property
    def closed(self) -> bool:
        """True after ``close``."""

    @property
    def n_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def block_tokens(self) -> int:
        """Token positions in a block."""

    @property
    def n_layers(self) -> int:
        """Layers of the model."""

    @property
    def n_kv_heads(self) -> int:
        """KV heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Elements of one head's K or V vector."""

    @property
    def dtype(self) -> str:
        """What the values are: 'float16', the only dtype of format 1."""

    @property
    def format(self) -> int:
        """The version of the wire format: 1."""

    @property
    def has_slab(self) -> bool:
        """
        False for a pool of ids, whose values are elsewhere (``copy``): no block, slab, export, import.
        """

    @property
    def block_bytes(self) -> int:
        """
        Bytes of one block's values: n_layers * 2 * n_kv_heads * block_tokens * head_dim * 2.
        """

    @property
    def meta_bytes(self) -> int:
        """
        Bytes the pool has allocated besides the slab: records, free list, index.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn: ...

    def __copy__(self) -> NoReturn: ...

    def __deepcopy__(self, memo: object, /) -> NoReturn: ...

    def export_into(self, ids: Array, buffer: Buffer | NDArray[Any]) -> int:
        """
        Writes the envelope of ``export`` into a buffer that is there already; returns its size.

        ``buffer`` is anything writable and C-contiguous (bytearray, memoryview, mmap, shared memory, a
        NumPy array) with at least ``export_bytes(len(ids))`` bytes; those after the envelope are left
        alone. The GIL is released for large ones. A new buffer for each export costs more than the export:
        its pages are touched for the first time.

        Raises:
            InvalidArgument: as for ``export``, or the buffer is too small or in the pool's own slab;
                nothing is written.
            ArgumentTypeError: the buffer is read-only or not contiguous.

        Source: seed section 2.4; formats/kv-block.md.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> ids = pool.alloc(1)
        >>> pool.set_fill(ids, 1)
        >>> buffer = bytearray(100)
        >>> pool.export_into(ids, buffer)
        60
        >>> buffer[:60] == pool.export(ids)
        True
        """

    def export_iter(self, ids: Array, chunk_bytes: Int = 1048576) -> Iterator[bytes]:
        """
        The envelope of ``export`` as an iterator over parts of about ``chunk_bytes`` each.

        A part is bytes and has at least one block; joined in order the parts are the envelope. One part
        exists at a time, so an envelope larger than memory can be written to a file or a stream. The ids
        are checked at once; until the iterator is done its blocks must stay held and unwritten.

        Raises:
            InvalidArgument: as for ``export``, here or when a part is made.

        Source: seed section 2.4; formats/kv-block.md.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> ids = pool.alloc(3)
        >>> pool.set_fill(ids, 1)
        >>> [len(part) for part in pool.export_iter(ids, chunk_bytes=60)]
        [84, 32]
        >>> b"".join(pool.export_iter(ids, chunk_bytes=60)) == pool.export(ids)
        True
        """

    def export_pieces(self, ids: Array) -> list[memoryview]:
        """
        The envelope of ``export`` as read-only pieces, most of them views of the slab.

        For ``socket.sendmsg``, ``os.writev`` and their like: joined in order the pieces are the envelope,
        but a full block is not copied, its piece is the block itself. Each payload byte is read once, for
        the CRC. The pieces keep the memory alive; they are right for as long as the blocks stay held and
        unwritten. At most 2 * len(ids) + 1 of them.

        Raises:
            InvalidArgument: as for ``export``.

        Source: seed section 2.4; formats/kv-block.md.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> ids = pool.alloc(2)
        >>> pool.set_fill(ids, [2, 1])
        >>> [len(piece) for piece in pool.export_pieces(ids)]    # header and record, block 0, the rest
        [40, 16, 32]
        >>> b"".join(pool.export_pieces(ids)) == pool.export(ids)
        True
        """

class _ExportParts:
    """The iterator of Pool.export_iter."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __next__(self) -> bytes: ...

class EnvelopeHeader:
    """
    An envelope's header, and the reader rules of formats/kv-block.md in steps.

    For bytes that come one after another, or that do not fit in memory: the constructor holds the first
    28 bytes to rules 1 and 2, ``accept`` to 4 and 5, ``check_records`` the blocks to 6, and at the end
    ``check_crc`` the whole to 3. For bytes that are all there, ``check`` does everything in the rules'
    own order. The code is the one that ``Pool.import_`` runs.

    Args:
        header: at least the first 28 bytes.
        size_bytes: the length of the whole; None when it is not known, as on a stream.

    Raises:
        CorruptEnvelope: rule 1 or 2 is broken. The text of this and of the other errors names the rule,
            the field and its offset, what was found and what was expected.
        InvalidArgument: fewer than 28 bytes.

    Source: seed section 2.4; formats/kv-block.md.

    >>> import kvpool.wire
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> ids = pool.alloc(2)
    >>> pool.set_fill(ids, [2, 1])
    >>> data = pool.export(ids)
    >>> header = kvpool.wire.EnvelopeHeader(data[:28], len(data))
    >>> header
    EnvelopeHeader(n_blocks=2, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2; 88 bytes)
    >>> header.accept(pool)
    >>> header.check_records(0, 2, data[28:], 12 + header.block_bytes)
    >>> header.check_crc(int.from_bytes(data[-4:], "little"), kvpool.crc32c(data[:-4]))
    """

    def __init__(self, header: Buffer | NDArray[Any], size_bytes: Int | None = None) -> None: ...

    @staticmethod
    def check(buffer: Buffer | NDArray[Any], shape: Pool | Array | None = None) -> EnvelopeHeader:
        """
        All reader rules in their order; the header of bytes that keep to them.

        ``shape`` is what the dimensions are held to: a Pool, or ``(block_tokens, n_layers, n_kv_heads,
        head_dim)``; None: any, but not 0. Nothing is imported and nothing allocated. The GIL is
        released for large buffers.

        Raises:
            CorruptEnvelope: the bytes are no valid envelope.
            ShapeMismatch: the dimensions are others than ``shape``.
            InvalidArgument: no C-contiguous buffer.

        Source: seed section 2.4; formats/kv-block.md.

        >>> import kvpool.wire
        >>> kvpool.wire.EnvelopeHeader.check(bytes(31))
        Traceback (most recent call last):
        kvpool.errors.CorruptEnvelope: tl_kv_envelope_check: length 31, an envelope has at least 32 bytes \\
        (rule 1)
        """

    def accept(self, shape: Pool | Array | None = None) -> None:
        """
        Rules 4 and 5: version, dtype, and the dimensions that ``shape`` (a Pool, or four integers) has.

        Raises CorruptEnvelope or ShapeMismatch.
        """

    def check_records(self, first: Int, count: Int, records: Buffer | NDArray[Any], stride: Int) -> None:
        """
        Rule 6 for blocks ``first`` to ``first + count - 1``.

        ``records`` has 12 bytes for each of them, the hash and n_tokens, at offsets 0, ``stride``, ....
        Raises CorruptEnvelope; InvalidArgument when the buffer or the envelope ends before.
        """

    def check_crc(self, stored: Int, computed: Int) -> None:
        """
        Rule 3: the checksum that the last four bytes store against that of all bytes before them.

        Raises CorruptEnvelope.
        """

    def __repr__(self) -> str: ...

    @property
    def version(self) -> int:
        """The format's version: 1 once accepted."""

    @property
    def dtype(self) -> int:
        """The element type: 1, float16, once accepted."""

    @property
    def n_blocks(self) -> int:
        """Blocks in the envelope; may be 0."""

    @property
    def block_tokens(self) -> int:
        """Positions in a block."""

    @property
    def n_layers(self) -> int:
        """Layers of the model."""

    @property
    def n_kv_heads(self) -> int:
        """KV heads of the model."""

    @property
    def head_dim(self) -> int:
        """Values in a head."""

    @property
    def crc32c(self) -> int:
        """The checksum at the end; 0 until it was checked."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's payload."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole envelope."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(block_tokens, n_layers, n_kv_heads, head_dim)``."""

def crc32c_combine(crc_a: Int, crc_b: Int, n_bytes_b: Int) -> int:
    """
    The CRC-32C of a then b, from those of a and of b and the length of b in bytes.

    About 100 ns, whatever the length. The CRC of a run of zeros follows from those of shorter runs, so
    the holes of a sparse file need not be read.

    >>> import kvpool.wire
    >>> data = b"123456789"
    >>> kvpool.crc32c(data) == kvpool.wire.crc32c_combine(
    ...     kvpool.crc32c(data[:4]), kvpool.crc32c(data[4:]), 5)
    True
    """

class _SequenceParts:
    """The iterator of Sequence.export_iter."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __next__(self) -> bytes: ...

class Sequence:
    """
    One request: its tokens, the blocks that hold their K and V, and what is computed of them.

    Made by ``BlockManager.allocate``, ``adopt`` and ``fork``. ``len`` is the number of tokens. The end
    of a ``with`` block frees it. A sequence that is dropped without being freed gives its blocks back
    when it is collected, with a ``ResourceWarning``. It cannot be pickled or copied: fork it, or move
    it with ``export``. Sequences keep what they need alive: the pool and the manager may be dropped
    before them.

    Every operation on a freed sequence raises ``InvalidArgument``.

    >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
    >>> mgr = kvpool.BlockManager(pool)
    >>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
    ...     len(seq), seq.n_blocks
    (5, 2)
    >>> seq.append(6)
    Traceback (most recent call last):
    kvpool.errors.InvalidArgument: the sequence is freed
    """

    def append(self, tokens: Ints) -> list[tuple[int, int]]:
        """
        Appends one token, or a row of them, and makes their slots writable.

        New blocks are taken where the last one is full; a last block that is shared, or registered and cut
        by ``truncate``, is replaced by a copy. Returns the copies as a list of ``(source, destination)``:
        empty, or one. For a decode step of many sequences: ``BlockManager.append``.

        Raises:
            PoolFull: not enough blocks; the text has the numbers.
            InvalidArgument: a token is out of range, or the sequence is freed.
            MemoryError: no memory for a longer table.

        Source: seed section 2.2.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3])
        >>> seq.append(4), seq.append([5, 6]), seq.tokens
        ([], [], array([1, 2, 3, 4, 5, 6], dtype=uint32))
        >>> seq.free()
        """

    def fork(self) -> Sequence:
        """
        A second Sequence with the same tokens over the same blocks, each with one more reference.

        Whoever appends first into a shared last block writes into a copy. O(len).

        Raises:
            InvalidArgument: the sequence is freed.
            MemoryError: no memory for another sequence.

        Source: seed section 2.2.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3, 4, 5])
        >>> child = seq.fork()
        >>> child.append(6), seq.blocks, child.blocks
        ([(1, 2)], array([0, 1], dtype=uint32), array([0, 2], dtype=uint32))
        >>> mgr.free([seq, child])
        """

    def truncate(self, n: Int) -> None:
        """
        Cuts the sequence to its first ``n`` tokens, as when draft tokens were rejected.

        Blocks behind the cut are given back, tail first. What was findable stays so. O(what is cut).

        Raises:
            InvalidArgument: ``n`` is negative or above the length, or the sequence is freed.

        Source: seed section 6 (L10.8).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3, 4, 5])
        >>> seq.truncate(3)
        >>> seq.tokens, seq.n_blocks
        (array([1, 2, 3], dtype=uint32), 1)
        >>> seq.free()
        """

    def commit(self, n_computed: Int | None = None) -> None:
        """
        Says that the K and V of the first ``n_computed`` tokens are written; all, if left out.

        Only now do full blocks among them become findable, and immutable. A block whose content is findable
        already stays private (``stats.duplicates``), and so does one whose name is held by different
        content (``stats.collisions``). Fewer tokens than before change nothing. O(new full blocks).

        Raises:
            InvalidArgument: ``n_computed`` is negative or above the length, or the sequence is freed.

        Source: seed section 2.3.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3, 4, 5])
        >>> seq.commit(4)
        >>> seq.n_computed, mgr.stats.n_findable
        (4, 1)
        >>> seq.free()
        """

    def found(self, n_found: Int, *, counted: bool = True) -> None:
        """
        Commits K and V that were not computed here but found: in a lower tier, on another machine.

        For what ``allocate`` did not find, and the caller has now copied, verified, into the sequence's own
        blocks. The first ``n_found`` tokens are committed and count as cached: in ``n_cached`` and, with
        ``counted`` (False for a request that was resumed), in the manager's hits. The manager's own tiers
        do this by themselves.

        Raises:
            InvalidArgument: ``n_found`` is not whole blocks, above the length or below ``n_cached``;
                something was computed since ``allocate``; the sequence is freed.

        Source: seed section 6 (L10.4).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3, 4, 5])
        >>> pool.block(seq.blocks[0])[:] = 0.5            # from wherever it was
        >>> seq.found(4)
        >>> seq.n_cached, seq.n_computed, mgr.stats.hit_tokens
        (4, 4, 4)
        >>> seq.free()
        """

    def free(self) -> None:
        """
        Gives the blocks back, tail first, so that a cached chain loses its end before its beginning.

        Findable blocks stay cached until their memory is needed; a sequence that was never committed leaves
        nothing findable.

        Raises:
            InvalidArgument: the sequence is freed already, or its manager is closed.

        Source: seed section 2.1.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3, 4, 5])
        >>> seq.commit()
        >>> seq.free()
        >>> pool.stats
        Stats(free=7, used=0, cached=1, evictions=0)
        """

    def pin(self, seconds: float) -> None:
        """
        Keeps the full committed blocks from eviction for so many seconds, also when it is freed.

        The blocks are held, as if by a fork, until the first call on the manager after that time, or until
        ``reset``. They count as used, so that much less fits meanwhile. Several pins on the same blocks are
        independent of each other.

        Raises:
            InvalidArgument: ``seconds`` is not above 0 or above 1e9, or the sequence is freed.
            MemoryError: no memory for another sequence.

        Source: none in the seed; pinned prefixes as other engines know them.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
        ...     seq.commit()
        ...     seq.pin(60)
        >>> pool.stats.used, mgr.stats.n_pins
        (1, 1)
        """

    def slot_mapping(self, first: Int = 0, n: Int | None = None, pad: Int = -1) -> NDArray[numpy.int64]:
        """
        Where the K and V of ``n`` positions from ``first`` on go: int64 ``(n,)``.

        ``block * block_tokens + offset`` for each, and ``pad`` at and past the length. ``n`` left out: to
        the end.

        Raises:
            InvalidArgument: a number is negative, or the sequence is freed.
            MemoryError: no memory for so many slots.

        Source: Kwon et al. (SOSP 2023), section 4.3.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3, 4, 5])
        >>> seq.slot_mapping(3), seq.slot_mapping(3, 4)
        (array([3, 4]), array([ 3,  4, -1, -1]))
        >>> seq.free()
        """

    def export(self) -> bytes:
        """
        An envelope of the computed tokens: bytes that another manager can import and adopt.

        All blocks up to ``n_computed``; the last one holds only what this sequence has of it, also where it
        was truncated into a longer block that others share. The GIL is released for large ones.

        Raises:
            InvalidArgument: the sequence is freed.
            MemoryError: no memory for the bytes.

        Source: seed sections 2.4 and 6 (L10.6); formats/kv-block.md.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3, 4, 5])
        >>> seq.commit(4)
        >>> len(seq.export()) == pool.export_bytes(1)
        True
        >>> seq.free()
        """

    def export_iter(self, chunk_bytes: Int = 1048576) -> Iterator[bytes]:
        """
        The envelope of ``export`` as an iterator over parts of about ``chunk_bytes`` each.

        As ``Pool.export_iter``: a part is bytes and has at least one block, and one exists at a time. The
        pool's lock is held for a part, not for the whole. What is computed when it is called is in it,
        tokens that are appended or committed meanwhile are not. Until it is done the sequence must neither
        be freed nor cut.

        Raises:
            InvalidArgument: the sequence is freed, or it was cut meanwhile; here or when a part is made.

        Source: seed sections 2.4 and 6 (L10.6); formats/kv-block.md.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
        ...     seq.commit()
        ...     parts = list(seq.export_iter(chunk_bytes=150))
        ...     [len(part) for part in parts], b"".join(parts) == seq.export()
        ([168, 144], True)
        """

    def export_block(self, index: Int, *, before: Buffer = b'', after: Buffer = b'') -> bytes:
        """
        The envelope of one computed block, between other bytes: bytes.

        ``index`` counts the sequence's blocks from 0. The result is ``before``, an envelope with n_blocks 1,
        and ``after``: a message of a framing around envelopes is made with one copy of the values. As in
        ``export``, the last block holds only what this sequence has computed of it. The GIL is released for
        large ones.

        Raises:
            InvalidArgument: nothing of that block is computed, or the sequence is freed.
            MemoryError: no memory for the bytes.

        Source: seed sections 2.4 and 6 (L10.6); formats/kv-block.md.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3, 4, 5])
        >>> seq.commit()
        >>> seq.export_block(1) == pool.export(seq.blocks[1:])
        True
        >>> seq.export_block(1, before=b"<", after=b">")[:5]
        b'<TLKV'
        >>> seq.free()
        """

    def save(self, path: str | PathLike[str]) -> None:
        """
        Writes the computed tokens' K and V to a file, for ``BlockManager.load``.

        A sealed envelope (formats/kv-seal.md): the tokens' digest, their number and the namespace, then the
        envelope of ``export``, a megabyte at a time. The file appears whole or not at all: it is written
        under no name, or a temporary one beside ``path``, synced, and then takes the place of what was at
        ``path``, which the folder's sync makes last. A writer that is killed leaves what was there before.
        Other threads may go on with the sequence, but not free or cut it.

        Raises:
            StorageError: the file cannot be written: no folder, no permission, no space.
            InvalidArgument: nothing is computed, or the sequence is freed.

        Source: docs/envelopes.md.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "session.tlks")
        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
        ...     seq.commit()
        ...     seq.save(path)
        >>> os.path.getsize(path) == 80 + pool.export_bytes(2)
        True
        """

    @property
    def n_tokens(self) -> int:
        """Its length in tokens; ``len(seq)`` is the same."""

    @property
    def n_cached(self) -> int:
        """Tokens that ``allocate`` took from the index: they need no prefill."""

    @property
    def n_computed(self) -> int:
        """Tokens whose K and V are written, as committed."""

    @property
    def n_blocks(self) -> int:
        """Blocks it holds: ``ceil(n_tokens / block_tokens)``."""

    @property
    def blocks(self) -> NDArray[numpy.uint32]:
        """The block ids: uint32 ``(n_blocks,)``, a copy."""

    @property
    def tokens(self) -> NDArray[numpy.uint32]:
        """The token ids: uint32 ``(n_tokens,)``, a copy."""

    @property
    def block_tokens(self) -> int:
        """Token positions in a block."""

    @property
    def namespace(self) -> int:
        """The root hash it was allocated under; 0 by default."""

    @property
    def is_freed(self) -> bool:
        """True after ``free``, and when its manager or pool is closed."""

    def __len__(self) -> int: ...

    def __bool__(self) -> bool: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn: ...

    def __copy__(self) -> NoReturn: ...

    def __deepcopy__(self, memo: object, /) -> NoReturn: ...

class BlockManager:
    """
    Turns prompts into block tables: one call for one request, and no forged hit.

    A sequence has tokens and blocks. A new prompt takes the longest prefix of full blocks that is
    findable in the manager's index, and new blocks for the rest; ``commit`` makes blocks findable, once
    their K and V are written::

        tokens --> proofs, once --> longest prefix held + blocks for the rest     allocate
               --> you compute K and V into the blocks
               --> full blocks become findable                                    commit
               --> next tokens, next blocks, copies of shared ones                append
               --> blocks go back, tail first                                     free

    Args:
        pool: the Pool to take blocks from. It has one manager at a time.
        prefix_cache: ``"hash"``, or ``"none"``: nothing is ever findable, every block is private.
        watermark: blocks that ``allocate`` leaves alone, for sequences that are already running.
        events: record what becomes findable and what stops being so, for ``drain_events``.
        tiers: where blocks live on that the pool evicts: a ``kvpool.tiers.TierStack``, or a list of
            tiers and URLs for one, fastest first (``["disk:/var/cache/kv?size=10GiB"]``). ``commit``
            then copies full blocks for them, and ``allocate`` looks there for what the pool does not
            have, up to a deadline. The manager closes them. docs/tiers.md.

    Hits are verified. The format's block hash (FNV-1a) can be collided on purpose by whoever chooses a
    prompt; here it only names blocks for other processes. Prefixes are found by a keyed 122-bit hash of
    everything from the first token on, with a secret of the process: a forged prompt misses, and is
    counted in ``stats.collisions``.

    Tokens are lists, tuples, ranges or 1-D integer arrays with values from 0 to 2**32 - 1 (a uint32
    array is read in place). A call that raises has changed nothing, the order of eviction included.
    All methods may be called from many threads at once: they run under the pool's lock, which is waited
    for without the GIL. While the manager lives, take blocks from the pool and import into it through
    the manager, and do not drop references that its sequences hold; reading, exporting and looking up
    directly are fine, and if blocks are evicted behind its back, it notices and forgets what nobody
    holds.

    The end: ``close`` (or the end of a ``with`` block) frees all sequences; so does closing the pool.
    Without either, the manager ends when it and all of its sequences are dropped, in any order.

    Raises:
        InvalidArgument: watermark of n_blocks or more, an unknown prefix_cache, a closed pool.
        Busy: the pool has a manager already.
        MemoryError: no memory for 40 bytes a block.

    Source: seed sections 2.3 and 6 (L10.2, L10.4); Kwon et al. (SOSP 2023), section 4.

    >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
    >>> mgr = kvpool.BlockManager(pool)
    >>> a = mgr.allocate(range(1, 11))               # 10 tokens: 3 blocks
    >>> pool.slab[a.blocks, 0, 0] = 1.0              # compute K and V ...
    >>> a.commit()                                   # ... and say so: 2 full blocks are findable
    >>> a.free()
    >>> b = mgr.allocate([*range(1, 9), 99, 98, 97])
    >>> b.n_cached                                   # tokens that need no prefill
    8
    >>> round(mgr.stats.hit_rate, 3)
    0.381
    >>> mgr.close()
    """

    def __init__(self, pool: Pool, *, prefix_cache: Literal['hash', 'none'] = 'hash', watermark: Int = 0, events: bool = False, tiers: TierStack | Iterable[Tier | str] | None = None) -> None: ...

    def allocate(self, tokens: Array, *, namespace: Int = 0, max_cached_tokens: Int | None = None, resumed: bool = False, match_last: bool = False) -> Sequence:
        """
        A Sequence for a prompt: the longest findable prefix, then new blocks; all or nothing.

        At most ``(len(tokens) - 1) // block_tokens`` blocks are taken from the index, since the last token
        is always left to compute. Hits are taken before anything is evicted. O(len(tokens)); the GIL is
        released for very long prompts.

        Args:
            tokens: the prompt. Empty is allowed: a sequence without blocks.
            namespace: the parent of the first block. 0, or a root hash that keeps prompts of another model,
                adapter or tenant apart.
            max_cached_tokens: take at most so many tokens from the index.
            resumed: a preempted request comes back; it does not count in prompt_tokens and hit_tokens.
            match_last: a prompt that ends with a block may hit that block too (nothing left to compute).

        Raises:
            PoolFull: hits that are cached + new blocks + watermark exceed the free and cached blocks; the
                text has the numbers.
            InvalidArgument: a token or argument is out of range, or the manager is closed.
            MemoryError: no memory for the sequence's table.

        Source: seed section 6 (L10.1, L10.4).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([5, 6, 7, 8, 9])
        >>> seq
        Sequence(n_tokens=5, n_cached=0, n_computed=0, n_blocks=2)
        >>> seq.blocks
        array([0, 1], dtype=uint32)
        >>> mgr.allocate(range(100))
        Traceback (most recent call last):
        kvpool.errors.PoolFull: tl_kv_seq_allocate: 25 blocks needed (25 new, 0 cached hits, watermark 0), \\
        6 are free or cached
        >>> seq.free()
        """

    def _allocate_in_pool(self, tokens: Array, root: Int, max_cached_tokens: Int | None, resumed: bool, match_last: bool) -> Sequence: ...

    def can_allocate(self, tokens: Array, *, namespace: Int = 0, max_cached_tokens: Int | None = None, match_last: bool = False) -> Fit:
        """
        What ``allocate`` would do with a prompt now, changing nothing.

        Returns Fit(fits, n_cached, n_new): whether it would succeed, the tokens it would take from the
        index and the blocks it would allocate, in both cases. Arguments as for ``allocate``. O(len(tokens)).

        Raises:
            InvalidArgument: as ``allocate``.
            MemoryError: as ``allocate``.

        Source: seed section 6 (L10.2, admission by free blocks).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool, watermark=2)
        >>> mgr.can_allocate(range(24)), mgr.can_allocate(range(25)).fits
        (Fit(fits=True, n_cached=0, n_new=6), False)
        """

    def append(self, seqs: Iterable[Sequence], tokens: Array) -> list[tuple[int, int]]:
        """
        A decode step: appends ``tokens[i]`` to ``seqs[i]``, for all sequences or for none.

        ``seqs`` is a list or tuple of sequences, each there once; ``tokens`` a row of as many ids. New
        blocks are taken where the last one is full, and a last block that is shared, or registered and
        cut, is replaced by a copy: the contents are copied, and the returned list has ``(source,
        destination)`` of each copy, for an engine that keeps more than this pool's values in step. Of
        several forks that share a block, all but one copy.

        Raises:
            PoolFull: not enough blocks; the text has the numbers.
            InvalidArgument: a sequence is freed, another manager's, or there twice; a token is out of
                range; the lengths differ.
            MemoryError: no memory for longer tables.

        Source: seed sections 2.2 and 6 (L10.1).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> parent = mgr.allocate([1, 2])
        >>> child = parent.fork()
        >>> mgr.append([parent, child], [3, 4])          # one of the two writes into a copy
        [(0, 1)]
        >>> parent.blocks, child.blocks
        (array([1], dtype=uint32), array([0], dtype=uint32))
        >>> mgr.free([parent, child])
        """

    def commit(self, seqs: Iterable[Sequence], n_computed: Array | None = None) -> None:
        """
        ``Sequence.commit`` for many: ``n_computed[i]`` for ``seqs[i]``, or all tokens of each.

        The whole row is checked first.

        Raises:
            InvalidArgument: a sequence is freed, another manager's, or there twice; more tokens than a
                sequence has; the lengths differ.

        Source: seed section 2.3.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seqs = [mgr.allocate([1, 2, 3, 4, 5]), mgr.allocate([6, 7])]
        >>> mgr.commit(seqs)
        >>> mgr.stats.n_findable
        1
        >>> mgr.free(seqs)
        """

    def free(self, seqs: Iterable[Sequence]) -> None:
        """
        Frees many sequences, in order: ``Sequence.free`` for each, for all or for none.

        Raises:
            InvalidArgument: a sequence is freed, another manager's, or there twice.

        Source: seed section 2.1.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seqs = [mgr.allocate([1, 2, 3]), mgr.allocate([4, 5])]
        >>> mgr.free(seqs)
        >>> pool.stats.used, seqs[0].is_freed
        (0, True)
        """

    def block_tables(self, seqs: Iterable[Sequence], out: NDArray[numpy.int32] | None = None, scale: Int = 1) -> NDArray[numpy.int32]:
        """
        The blocks of many sequences as one table, for a kernel: int32 ``(n, columns)``.

        Row i has the block ids of ``seqs[i]`` times ``scale``, and -1 behind its last block. Without
        ``out`` the table is new and as wide as the longest sequence needs. ``out`` is the caller's int32
        C-contiguous array with one row for each sequence (a slice of a larger one: ``buffer[:n]``) and at
        least as many columns; it is filled and returned. Where a kernel sees the slab as pages of one
        layer's K or V, ``scale=2 * n_layers`` gives the page of layer 0's K.

        Raises:
            InvalidArgument: ``out`` has too few columns, another number of rows, another dtype or layout; a
                product exceeds int32 or ``scale`` is 0; a sequence is freed or another manager's. What
                ``out`` then holds is undefined.

        Source: seed section 6 (L9.4).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seqs = [mgr.allocate(range(9)), mgr.allocate([1, 2])]
        >>> mgr.block_tables(seqs)
        array([[ 0,  1,  2],
               [ 3, -1, -1]], dtype=int32)
        >>> buffer = np.empty((64, 4), np.int32)         # for any batch of up to 64
        >>> mgr.block_tables(seqs, out=buffer[:2])[1]
        array([ 3, -1, -1, -1], dtype=int32)
        >>> mgr.free(seqs)
        """

    def slot_mapping(self, seqs: Iterable[Sequence], first: Ints, n: Ints, pad: Int = -1) -> NDArray[numpy.int64]:
        """
        Where the K and V of positions go, for many sequences: int64, one row after the other.

        For ``seqs[i]`` the slots of positions ``first[i]`` to ``first[i] + n[i] - 1``: ``block *
        block_tokens + offset`` for each, and ``pad`` at and past its length. ``first`` and ``n`` are one
        number for all, or one for each. The result has ``sum(n)`` elements.

        Raises:
            InvalidArgument: a sequence is freed or another manager's; a number is negative; lengths differ.
            MemoryError: no memory for so many slots.

        Source: Kwon et al. (SOSP 2023), section 4.3.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seqs = [mgr.allocate(range(5)), mgr.allocate([1, 2])]
        >>> mgr.slot_mapping(seqs, mgr.seq_lens(seqs) - 1, 1)      # of each one's last token
        array([4, 9])
        >>> mgr.free(seqs)
        """

    def seq_lens(self, seqs: Iterable[Sequence]) -> NDArray[numpy.int32]:
        """
        The lengths of many sequences: int32 ``(n,)``.

        Raises:
            InvalidArgument: a sequence is freed or another manager's, or longer than int32 holds.

        Source: seed section 6 (L9.4, ctx_lens).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate(range(9))
        >>> mgr.seq_lens([seq])
        array([9], dtype=int32)
        >>> seq.free()
        """

    def reset(self, namespace: Int | None = None) -> None:
        """
        Ends all hits on what was computed so far, as after a change of weights.

        Sequences that are alive go on, but their later commits do not become findable. Pins end. With
        ``namespace``, only what was computed under that root. O(n_blocks).

        Raises:
            InvalidArgument: ``namespace`` is no integer from 0 to 2**64 - 1, or the manager is closed.

        Source: seed section 6 (L10.4).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
        ...     seq.commit()
        >>> mgr.can_allocate([1, 2, 3, 4, 5]).n_cached
        4
        >>> mgr.reset()
        >>> mgr.can_allocate([1, 2, 3, 4, 5]).n_cached
        0
        """

    def evict(self, ids: Ints) -> None:
        """
        Makes blocks unfindable now: one id or a row; blocks that are not findable are left alone.

        A cached block becomes free. One that somebody holds stays with its holders, and becomes free and
        not cached when the last one lets go.

        Raises:
            InvalidArgument: an id is out of range; no block has changed.

        Source: seed section 2.1.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
        ...     seq.commit()
        ...     first = seq.blocks[0]
        >>> mgr.evict(first)
        >>> pool.stats
        Stats(free=8, used=0, cached=0, evictions=0)
        """

    def import_(self, buffer: Buffer | NDArray[Any], *, named: bool = True) -> NDArray[numpy.uint32]:
        """
        ``Pool.import_`` for a managed pool: uint32 ``(n,)``, blocks that the caller holds.

        They carry names but no proof of what was computed into them: nothing is findable before ``adopt``
        has seen the tokens. To drop them instead: ``mgr.pool.unref(ids)``. Where the tokens are at hand,
        ``import_sequence`` does it all, and checks more.

        ``named=False`` leaves the names out as well. The blocks are then the caller's alone: nobody can find
        one in the pool before ``adopt``, and one that is let go is free and not cached. That is for bytes from
        a sender whose word for a name is no proof, while the tokens are still to come.

        Raises:
            CorruptEnvelope: the bytes break the format's rules.
            ShapeMismatch: an envelope made for another pool.
            PoolFull: fewer blocks are free or cached than it holds.
            InvalidArgument: no contiguous buffer.

        Source: seed sections 2.4 and 6 (L10.6).

        >>> pools = [kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8) for _ in "ab"]
        >>> a, b = [kvpool.BlockManager(pool) for pool in pools]
        >>> with a.allocate([1, 2, 3, 4, 5]) as seq:
        ...     seq.commit()
        ...     envelope = seq.export()
        >>> ids = b.import_(envelope)
        >>> b.can_allocate([1, 2, 3, 4, 9]).n_cached
        0
        >>> pools[1].unref(ids)
        """

    def find(self, hashes: Array, *, take: bool = False) -> NDArray[numpy.int64]:
        """
        The findable blocks of these names: int64 ``(n,)``, block ids, -1 where there is none.

        ``hashes`` is a row, as ``block_hashes`` gives it. Only blocks in the prefix index count, those whose
        content is proven; a block that merely carries a name (imported and not adopted, of before a reset) is
        none, where ``pool.lookup`` would find it. Nothing is changed; with ``take`` each block found has one
        more reference, to be given back with ``pool.unref`` or to ``adopt``. A name can be forged by whoever
        chose the prompt, so what was taken by name has to be among ``adopt``'s ``proven``.

        Raises:
            InvalidArgument: a hash is no integer from 0 to 2**64 - 1, or the manager is closed.

        Source: seed section 6 (L10.6).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
        ...     seq.commit()
        >>> names = kvpool.block_hashes([1, 2, 3, 4, 9, 9, 9, 9], block_tokens=4)
        >>> mgr.find(names)
        array([ 0, -1])
        """

    def import_sequence(self, buffer: Buffer | NDArray[Any], tokens: Array, namespace: Int = 0) -> Sequence:
        """
        A Sequence from an envelope and the tokens that its blocks were computed from.

        The names in the envelope must be those that the tokens give, each block must hold as many positions
        as its tokens, and the envelope must keep to the format: all of it is checked before a block is
        taken. All tokens count as computed, and the full blocks become findable, as by ``commit``. A block
        that the envelope gives no name is taken on trust. The GIL is released.

        Raises:
            CorruptEnvelope: the bytes break the format's rules, or are not of these tokens.
            ShapeMismatch: an envelope made for another pool.
            PoolFull: fewer blocks are free or cached than it holds.
            InvalidArgument: a token is out of range, no contiguous buffer.
            MemoryError: no memory for the sequence's table; blocks may have been evicted.

        Source: seed sections 2.4 and 6 (L10.6).

        >>> pools = [kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8) for _ in "ab"]
        >>> a, b = [kvpool.BlockManager(pool) for pool in pools]
        >>> with a.allocate([1, 2, 3, 4, 5]) as seq:
        ...     seq.commit()
        ...     tokens, envelope = seq.tokens, seq.export()
        >>> with b.import_sequence(envelope, tokens) as seq:
        ...     seq.n_computed
        5
        >>> b.can_allocate([1, 2, 3, 4, 9]).n_cached
        4
        >>> b.import_sequence(envelope, [1, 2, 3, 0, 5])
        Traceback (most recent call last):
        kvpool.errors.CorruptEnvelope: import_sequence: block 0 is named ...
        """

    def load(self, path: str | PathLike[str], tokens: Array, *, namespace: Int = 0) -> Sequence:
        """
        A Sequence that ``Sequence.save`` wrote, to go on with where it was.

        ``tokens`` are those of the sequence: first the ones whose K and V are in the file, all of them, then
        any that are still to be computed (the last token that was sampled, usually). The prefix that is
        findable here already is taken from the index, the rest from the file, and what is full becomes
        findable, as by ``commit``. ``n_computed`` is then what it was.

        An envelope does not say which model made it. The file has the namespace that the sequence was
        allocated under, and this one must be the same: with one namespace for each model and revision
        (``kvpool.namespace``) a file of another model is refused. In namespace 0 only the dimensions tell
        models apart.

        The file is read twice: the first time everything is checked, and only then a block is taken. What
        is refused changes nothing, the order of eviction included.

        Raises:
            CorruptEnvelope: no file of ``save``, damaged or cut.
            ShapeMismatch: made for a pool of other dimensions.
            InvalidArgument: other tokens or another namespace than those in the file.
            PoolFull: not enough blocks.
            StorageError: the file cannot be read; or it changed between the two times: then everything is
                given back, though cached blocks may have been evicted.

        Source: seed sections 2.4 and 6; docs/envelopes.md.

        >>> import os, tempfile
        >>> pools = [kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8) for _ in "ab"]
        >>> a, b = [kvpool.BlockManager(pool) for pool in pools]
        >>> path = os.path.join(tempfile.mkdtemp(), "session.tlks")
        >>> with a.allocate([1, 2, 3, 4, 5, 6]) as seq:
        ...     seq.commit(5)
        ...     seq.save(path)
        >>> with b.load(path, [1, 2, 3, 4, 5, 6]) as seq:
        ...     seq.n_tokens, seq.n_computed
        (6, 5)
        >>> b.can_allocate([1, 2, 3, 4, 9]).n_cached
        4
        >>> b.load(path, [1, 2, 3, 4, 7, 6])
        Traceback (most recent call last):
        kvpool.errors.InvalidArgument: load: tokens: other than the 5 ...
        """

    def adopt(self, ids: Array, tokens: Array, namespace: Int = 0, *, proven: Array | None = None) -> Sequence:
        """
        A Sequence of blocks that the caller holds and whose K and V are computed.

        ``ids`` are the ``ceil(len(tokens) / block_tokens)`` blocks of ``tokens``, from ``import_`` or taken
        with ``pool.lookup``. The caller's references become the sequence's, all of its tokens count as
        computed, and its full blocks become findable, as by ``commit``. A full block must be registered
        under the name that the tokens give it, or under none: then the tokens are taken on trust. Each
        block must hold at least as many positions as its tokens.

        ``proven`` are positions in ``ids`` whose blocks were not brought by the caller but taken by name
        (``find``): those must be findable as exactly this prefix, now. A forged name does not pass, nor a block
        that nobody has proven, or that was reset since.

        Raises:
            CorruptEnvelope: the blocks are not of these tokens, not full enough, or not proven.
            InvalidArgument: nobody holds a block, a block is there twice, or their number is wrong.
            MemoryError: no memory for the sequence's table.

            The references stay with the caller when it raises.

        Source: seed section 6 (L10.6).

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> with mgr.allocate([1, 2, 3, 4]) as seq:
        ...     seq.commit()
        >>> ids = pool.lookup(kvpool.block_hashes([1, 2, 3, 4], block_tokens=4))
        >>> mgr.adopt(ids, [1, 2, 3, 9])
        Traceback (most recent call last):
        kvpool.errors.CorruptEnvelope: tl_kv_mgr_adopt: ids[0] is block 0, which is registered, but not ...
        >>> mgr.adopt(ids, [1, 2, 3, 4]).free()
        """

    def drain_events(self, max: Int | None = None) -> list[BlockEvent]:
        """
        Takes up to ``max`` events out of the queue, oldest first; all of them without ``max``.

        Returns a list of BlockEvent(number, type, hash, parent, block, tokens). The queue holds 65,536;
        past that the newest are dropped and counted (``stats.events_lost``), which shows as a gap in the
        numbers. Replaying all events rebuilds the set of findable hashes.

        Raises:
            Unsupported: the manager was made without ``events=True``.
            InvalidArgument: ``max`` is negative, or the manager is closed.

        Source: seed section 2.3 (what the prefix index holds).

        >>> pool = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool, events=True)
        >>> with mgr.allocate([1, 2, 3]) as seq:
        ...     seq.commit()
        >>> mgr.reset()
        >>> [event.type.name for event in mgr.drain_events()]
        ['STORED', 'CLEARED']
        """

    def check(self) -> None:
        """
        Compares the manager with itself and with its pool, and raises at the first disagreement.

        Sequences, blocks and index: holders counted, lengths and tables agreeing, proofs following from
        tokens, every index entry where its proof leads, fills; then ``pool.check()``. For tests and
        debugging; O(n_blocks + all tokens).

        Raises:
            KvPoolError: a disagreement: a bug, or references that were dropped behind its back.
            InvalidArgument: the manager is closed.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> kvpool.BlockManager(pool).check()
        """

    def close(self) -> None:
        """
        Frees all sequences and ends the manager; again does nothing.

        What was committed stays cached in the pool under its names, but the proofs are gone: another
        manager of the pool does not find it. Closing the pool closes its manager.

        Raises:
            Nothing.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> mgr = kvpool.BlockManager(pool)
        >>> seq = mgr.allocate([1, 2, 3])
        >>> mgr.close()
        >>> seq.is_freed, pool.stats.used
        (True, 0)
        """

    @property
    def tiers(self) -> TierStack | None:
        """
        The ``kvpool.tiers.TierStack`` it was made with, or None: what the lower tiers hold and did.
        """

    @property
    def stats(self) -> ManagerStats:
        """
        ManagerStats: counters since the manager was made, and what it holds now. O(1).

        Raises:
            InvalidArgument: the manager is closed.

        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> kvpool.BlockManager(pool).stats.hit_rate
        0.0
        """

    @property
    def pool(self) -> Pool:
        """The Pool it was made for."""

    @property
    def closed(self) -> bool:
        """True after ``close``, or after the pool's."""

    @property
    def prefix_cache(self) -> str:
        """'hash' or 'none', as it was made."""

    @property
    def watermark(self) -> int:
        """Blocks that ``allocate`` leaves alone."""

    @property
    def meta_bytes(self) -> int:
        """
        Bytes allocated for blocks (40 each), sequences (as many as there were) and events; those of the pool are ``pool.meta_bytes``.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn: ...

    def __copy__(self) -> NoReturn: ...

    def __deepcopy__(self, memo: object, /) -> NoReturn: ...

class ThreadPool:
    """
    Threads for the kernels: ``n_threads`` work on a call, the calling thread among them.

    ``None`` is one for each processor that this process may use. One object serves a whole program: it
    may be used from many threads, whose calls then follow one another. Between calls its threads sleep.
    Results do not depend on it: the same bits with any number of threads, or with ``threads=None``.
    In a child of ``os.fork`` the caller does all the work itself.

    Raises:
        InvalidArgument: ``n_threads`` is 0 or above 1024.
        MemoryError: the system started fewer threads.

    >>> with kvpool.attention.ThreadPool(2) as threads:
    ...     threads.n_threads
    2
    """

    def __init__(self, n_threads: Int | None = None) -> None: ...

    @property
    def n_threads(self) -> int:
        """How many threads work on a call, the caller included."""

    def close(self) -> None:
        """
        Ends the threads, when the calls that use them are done. A closed pool cannot be used again.

        >>> threads = kvpool.attention.ThreadPool(2)
        >>> threads.close()
        >>> threads
        ThreadPool(2) closed
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def __repr__(self) -> str: ...

def paged_decode(q: NDArray[numpy.float32], pool: Pool, layer: Int, block_tables: NDArray[numpy.integer[Any]] | Row[Array], context_lens: Array, *, scale: float | None = None, window: Int = 0, out: NDArray[numpy.float32] | None = None, threads: ThreadPool | None = None) -> NDArray[numpy.float32]:
    """
    Attention of one query for each sequence, over the blocks where its K and V lie.

    Args:
        q: float32 ``(B, H, head_dim)``, one position for each of B sequences. H is a multiple of the
            pool's ``n_kv_heads``; query head h reads KV head ``h // (H // n_kv_heads)``.
        pool: the blocks; they must be held by the caller, and their positions written.
        layer: 0 to ``pool.n_layers - 1``.
        block_tables: integers ``(B, max_blocks)``, as ``BlockManager.block_tables`` gives them; row b's
            first ``ceil(context_lens[b] / block_tokens)`` are read, whatever stands behind them.
        context_lens: integers ``(B,)``: the positions of a sequence, the query's own included, which is
            the last.
        scale: of the scores; ``1 / sqrt(head_dim)`` when None.
        window: how many positions a query sees, its own included; 0 is all.
        out: where the result goes, float32 C-contiguous like q; must not overlap it. A new array when
            None.
        threads: a ``ThreadPool``; None: this thread alone.

    Returns ``out``: float32 ``(B, H, head_dim)``.

    A row's bits do not depend on the batch around it, on threads, block ids or the block size, and
    are those of ``paged_prefill`` at that position (docs/attention.md). The GIL is released for all but
    the smallest calls, and the pool's lock is not held: others may alloc and free meanwhile.

    Raises:
        InvalidArgument: a context of no position or of more blocks than its row has, an id, layer or
            shape out of range, ``scale`` NaN or above 2.3e38, ``out`` of another shape, or part
            of q or the pool.
        ArgumentTypeError: q or out are no float32 arrays.
        ShapeMismatch: heads or head_dim unlike the pool's.
        Unsupported: the pool has no memory of its own, or belongs to another process.

    Source: seed L9.4; Kwon et al. (SOSP 2023), section 4.3; Milakov and Gimelshein, Online normalizer
    calculation for softmax (2018); Dao et al., FlashAttention (2022).

    >>> import numpy as np
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> table = pool.alloc(2)
    >>> for i, value in enumerate([1.0, 2.0, 6.0]):      # V of three positions; their K are equal
    ...     pool.slab[table[i // 2], 0, 0, 0, i % 2] = 1.0
    ...     pool.slab[table[i // 2], 0, 1, 0, i % 2] = value
    >>> q = np.ones((1, 1, 2), dtype=np.float32)
    >>> kvpool.attention.paged_decode(q, pool, 0, [table], [3])
    array([[[3., 3.]]], dtype=float32)
    >>> kvpool.attention.paged_decode(q, pool, 0, [table], [3], window=2)
    array([[[4., 4.]]], dtype=float32)
    """

def paged_prefill(q: NDArray[numpy.float32], pool: Pool, layer: Int, block_table: Array, context_len: Int, *, scale: float | None = None, window: Int = 0, out: NDArray[numpy.float32] | None = None, threads: ThreadPool | None = None) -> NDArray[numpy.float32]:
    """
    Causal attention of the last T positions of one sequence, over the blocks of its K and V.

    Args:
        q: float32 ``(T, H, head_dim)``; query t stands at position ``context_len - T + t`` and sees the
            positions up to its own. K and V of all ``context_len`` positions are written already.
        block_table: integers, at least ``ceil(context_len / block_tokens)``.
        context_len: positions of the sequence, T at least.

    The other arguments, the errors and what may be relied on are those of ``paged_decode``: row t has
    the bits of a decode at ``context_len - T + t + 1`` positions, so that a prompt may be cut into
    chunks anywhere.

    Returns ``out``: float32 ``(T, H, head_dim)``.

    >>> import numpy as np
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> table = pool.alloc(2)
    >>> for i, value in enumerate([1.0, 2.0, 6.0]):
    ...     pool.slab[table[i // 2], 0, 0, 0, i % 2] = 1.0
    ...     pool.slab[table[i // 2], 0, 1, 0, i % 2] = value
    >>> q = np.ones((3, 1, 2), dtype=np.float32)
    >>> kvpool.attention.paged_prefill(q, pool, 0, table, 3)[:, 0, 0]
    array([1. , 1.5, 3. ], dtype=float32)
    """

class ReuseStack:
    """
    Blocks by how recently they were used, for streams of any length.

    The depth of a block is the size of the smallest least-recently-used pool that would still hold it, so
    one pass over a trace gives the hits of every pool size (Mattson et al., Evaluation techniques for
    storage hierarchies, 1970). O(log n) a block.

    Args:
        max_blocks: remember so many of the most recently used at least; what lies deeper may be
            forgotten, so memory stays bounded (about 150 bytes each at most).

    Raises:
        InvalidArgument: ``max_blocks`` is 0 or above 2**31.
        MemoryError: no memory.

    >>> from kvpool.replay import ReuseStack
    >>> stack = ReuseStack(1000)
    >>> stack.use([7, 8, 9], 0.0)[0]                 # nothing was used before
    array([0, 0, 0], dtype=uint64)
    >>> stack.use([5], 1.0)[0], stack.use([7, 8], 2.5)
    (array([0], dtype=uint64), (array([2, 3], dtype=uint64), array([0., 0.])))
    >>> len(stack)
    4
    """

    def __init__(self, max_blocks: Int) -> None: ...

    def use(self, keys: Array, now: float) -> tuple[NDArray[numpy.uint64], NDArray[numpy.float64]]:
        """
        One request: the depth of each block before it, and when it was last used.

        ``keys`` names the request's blocks from the first one on, uint64, each together with everything before
        it. Returns ``(depths, stamps)``: uint64 ``(n,)`` with 0 for a block that is not remembered, and
        float64 ``(n,)`` with NaN for it. Then all of them are used at the time ``now``, the last one first.

        Raises:
            InvalidArgument: a key is out of range.
            MemoryError: no memory; nothing has changed.
        """

    def use_batch(self, tokens: Array, n_blocks: Array, times: NDArray[numpy.float64], block_tokens: Int) -> tuple[NDArray[numpy.uint64], NDArray[numpy.uint64], NDArray[numpy.float64]]:
        """
        Many requests in one call: ``use`` for each, with the names of their blocks worked out here.

        Args:
            tokens: uint32, the prompts one after the other, ``block_tokens`` tokens a block.
            n_blocks: uint64 ``(n,)``, the blocks of each.
            times: float64 ``(n,)``, when each comes.
            block_tokens: tokens of a block; the names are the format's chained hashes.

        Returns ``(names, depths, stamps)`` of all blocks, one request after the other.

        Raises:
            InvalidArgument: the lengths do not add up, or a value is out of range; nothing has changed.
            MemoryError: no memory; the requests before that point are used.
        """

    def read(self, depth: Int, n: Int) -> tuple[NDArray[numpy.uint64], NDArray[numpy.float64], NDArray[numpy.float64]]:
        """
        The blocks at depths ``depth`` to ``depth + n - 1``; the newest is 1.

        Returns ``(keys, firsts, lasts)``: uint64, and float64 with when each was first used since it is
        remembered, and last. Shorter than ``n`` at the end of the stack.
        """

    def __len__(self) -> int: ...

def policy_hits(policy: Int, blocks: Array, starts: Array, parents: Array, capacity: Int, first_counted: Int = 0, match_last: bool = True) -> int:
    """
    How many blocks of a trace a cache of one size hits under one order of eviction.

    Args:
        policy: 0 LRU (the pool's), 1 FIFO, 2 LFU, 3 position, 4 S3-FIFO, 5 W-TinyLFU, 6 optimal.
        blocks: uint32, the requests' blocks one after the other, numbered from 0.
        starts: uint64 ``(n_requests + 1,)``: where each request begins.
        parents: uint32 ``(n_blocks,)``: the block before each, or 2**32 - 1 where it begins a prompt.
        capacity: blocks of the cache.
        first_counted: the first request whose hits count; the ones before it warm the cache up.
        match_last: count the last block of a request, too.

    The GIL is released.

    Raises:
        InvalidArgument: the arrays do not describe a trace.
        MemoryError: no memory.

    >>> from kvpool.replay import policy_hits
    >>> none = 2**32 - 1
    >>> policy_hits(0, [0, 1, 2, 0, 1], [0, 2, 3, 5], [none, 0, none], 2), \\
    ...     policy_hits(6, [0, 1, 2, 0, 1], [0, 2, 3, 5], [none, 0, none], 2)
    (1, 2)
    """

def block_hash(parent: Int, tokens: Array) -> int:
    """
    The name of a full block: chained FNV-1a 64 over the parent's hash and the token ids.

    ``parent`` is the hash of the block before it, 0 for the first; ``tokens`` is a row of ints from 0 to
    2**32 - 1. Equal hashes mean equal prefixes, unless somebody forged them: the hash is not
    cryptographic. Never 0, which means "no hash".

    Raises:
        InvalidArgument: a token or the parent is out of range.

    Source: seed section 2.3.

    >>> hex(kvpool.block_hash(0, [1, 2]))
    '0xa91ab0c1027b9366'
    >>> hex(kvpool.block_hash(0xA91AB0C1027B9366, [3, 4]))
    '0x3df829571605c60'
    """

def block_hashes(tokens: Array, block_tokens: Int = 16, parent: Int = 0) -> NDArray[numpy.uint64]:
    """
    The hashes of a prompt's full blocks, each chained to the one before.

    Returns uint64 ``(len(tokens) // block_tokens,)``: a partial block at the end has no hash. ``parent``
    is the root of the chain: 0, or the hash of the last full block when a longer prompt goes on. The
    GIL is released for long prompts.

    Raises:
        InvalidArgument: a token or the parent is out of range, or ``block_tokens`` is 0.

    Source: seed section 2.3.

    >>> [hex(h) for h in kvpool.block_hashes([1, 2, 3, 4, 5], block_tokens=2)]
    ['0xa91ab0c1027b9366', '0x3df829571605c60']
    """

def crc32c(buffer: Buffer | NDArray[Any], crc: Int = 0) -> int:
    """
    CRC-32C (Castagnoli) of a C-contiguous buffer; ``crc`` continues an earlier result.

    The checksum of the wire format: reflected polynomial 0x82F63B78, initial value and final XOR
    0xFFFFFFFF. The GIL is released for large buffers.

    Raises:
        InvalidArgument: the buffer is not contiguous, or no buffer; ``crc`` is not in 0 .. 2**32 - 1.

    Source: seed section 2.4.

    >>> hex(kvpool.crc32c(b"123456789"))
    '0xe3069283'
    >>> kvpool.crc32c(b"6789", kvpool.crc32c(b"12345")) == kvpool.crc32c(b"123456789")
    True
    """

def _raise_status(arg0: int, arg1: str, /) -> None:
    """Raises the exception of a tl_status, for the tests of that table."""
