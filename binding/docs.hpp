// Docstrings. Each says shapes, dtypes, side effects, what it raises and where it comes from, and
// ends in an example; tests/test_doctests.py runs them all. Words that every one of them uses:
//
//   ids     one block id, or a row of them (Ints in args.hpp); a row is checked whole first
//   held    a block with at least one reference (used); full: fill == block_tokens
#pragma once

namespace kvpool::docs {

constexpr const char *pool =
    R"(A slab of KV cache blocks with reference counts, a prefix index and a wire format.

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
)";

constexpr const char *alloc = R"(Takes ``n`` blocks, or one when ``n`` is left out: all or nothing.

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
)";

constexpr const char *ref =
    R"(Adds one reference to each block: a fork does this to every block of its parent.

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
)";

constexpr const char *unref = R"(Takes one reference from each block.

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
)";

constexpr const char *refs = R"(How many references each block has: 0 for free and cached blocks.

Returns an int for one id, uint32 ``(n,)`` for a row.

Raises:
    InvalidArgument: an id is out of range.

>>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
>>> id = pool.alloc()
>>> pool.refs(id), pool.refs([0, 1])
(1, array([1, 0], dtype=uint32))
)";

constexpr const char *cow = R"(Makes blocks that the caller may write: copy on write.

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
)";

constexpr const char *set_fill =
    R"(Says how many positions of each block hold data: 0 to ``block_tokens``.

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
)";

constexpr const char *fill = R"(How many positions of each block hold data.

Returns an int for one id, uint32 ``(n,)`` for a row.

Raises:
    InvalidArgument: an id is out of range.

>>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
>>> pool.fill(pool.alloc())
0
)";

constexpr const char *register_ =
    R"(Makes full blocks findable under their hashes, and immutable from now on.

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
)";

constexpr const char *hash = R"(The hash each block is registered under.

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
)";

constexpr const char *lookup =
    R"(Finds registered blocks by hash and takes a reference on each one found.

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
)";

constexpr const char *block = R"(A view of one block's values: no copy, writable.

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
)";

constexpr const char *slab = R"(A view of all blocks' values: no copy, writable.

float16 ``(n_blocks, n_layers, 2, n_kv_heads, block_tokens, head_dim)``, C-contiguous. Index it with
an array of ids to gather a sequence's blocks. The rules of ``block`` hold.

Raises:
    InvalidArgument: the pool is closed.
    Unsupported: a pool of ids.

>>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=4)
>>> ids = pool.alloc(3)
>>> pool.slab[ids, 0, 0].shape   # K of layer 0: (blocks, n_kv_heads, block_tokens, head_dim)
(3, 1, 2, 4)
)";

constexpr const char *export_ =
    R"(Writes held blocks into an envelope: bytes that another process can import.

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
)";

constexpr const char *export_bytes =
    R"(The size in bytes of an envelope of ``n`` blocks: 28 + n * (12 + block_bytes) + 4.

Raises:
    InvalidArgument: ``n`` is no integer from 0 to 2**32 - 1, or the size overflows 64 bits.

Source: seed section 2.4.

>>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
>>> pool.export_bytes(1)
60
)";

constexpr const char *import_ =
    R"(Takes blocks for an envelope, copies its values in and registers its full blocks.

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
)";

constexpr const char *check =
    R"(Compares everything the pool stores twice, and raises at the first disagreement.

Every block in exactly one state, the free list without duplicates, the LRU list, the index against
the records in both directions, fills and counts. For tests and debugging; O(n_blocks).

Raises:
    KvPoolError: the pool disagrees with itself: a bug in the library, or a stray write.
    InvalidArgument: the pool is closed.

>>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
>>> pool.check()
)";

constexpr const char *close = R"(Ends the pool; again is allowed, and does nothing.

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
)";

constexpr const char *stats =
    R"(Stats(free, used, cached, evictions): blocks in each state, counted in O(1).

Raises:
    InvalidArgument: the pool is closed.

>>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
>>> pool.stats.free
4
)";

constexpr const char *closed = "True after ``close``.";
constexpr const char *n_blocks = "Blocks in the pool.";
constexpr const char *block_tokens = "Token positions in a block.";
constexpr const char *n_layers = "Layers of the model.";
constexpr const char *n_kv_heads = "KV heads of a layer.";
constexpr const char *head_dim = "Elements of one head's K or V vector.";
constexpr const char *dtype = "What the values are: 'float16', the only dtype of format 1.";
constexpr const char *format = "The version of the wire format: 1.";
constexpr const char *has_slab = "False for a pool of ids, whose values are elsewhere (``copy``): "
                                 "no block, slab, export, import.";
constexpr const char *block_bytes =
    "Bytes of one block's values: n_layers * 2 * n_kv_heads * block_tokens * head_dim * 2.";
constexpr const char *meta_bytes =
    "Bytes the pool has allocated besides the slab: records, free list, index.";

constexpr const char *block_hash =
    R"(The name of a full block: chained FNV-1a 64 over the parent's hash and the token ids.

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
)";

constexpr const char *block_hashes =
    R"(The hashes of a prompt's full blocks, each chained to the one before.

Returns uint64 ``(len(tokens) // block_tokens,)``: a partial block at the end has no hash. ``parent``
is the root of the chain: 0, or the hash of the last full block when a longer prompt goes on. The
GIL is released for long prompts.

Raises:
    InvalidArgument: a token or the parent is out of range, or ``block_tokens`` is 0.

Source: seed section 2.3.

>>> [hex(h) for h in kvpool.block_hashes([1, 2, 3, 4, 5], block_tokens=2)]
['0xa91ab0c1027b9366', '0x3df829571605c60']
)";

constexpr const char *crc32c =
    R"(CRC-32C (Castagnoli) of a C-contiguous buffer; ``crc`` continues an earlier result.

The checksum of the wire format: reflected polynomial 0x82F63B78, initial value and final XOR
0xFFFFFFFF. The GIL is released for large buffers.

Raises:
    InvalidArgument: the buffer is not contiguous, or no buffer; ``crc`` is not in 0 .. 2**32 - 1.

Source: seed section 2.4.

>>> hex(kvpool.crc32c(b"123456789"))
'0xe3069283'
>>> kvpool.crc32c(b"6789", kvpool.crc32c(b"12345")) == kvpool.crc32c(b"123456789")
True
)";

} // namespace kvpool::docs
