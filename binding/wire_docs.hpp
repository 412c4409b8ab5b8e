// What Python says about the functions of wire.cpp. The examples run as doctests.
#pragma once

namespace kvpool::docs {

constexpr const char *export_into =
    R"(Writes the envelope of ``export`` into a buffer that is there already; returns its size.

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
)";

constexpr const char *export_iter =
    R"(The envelope of ``export`` as an iterator over parts of about ``chunk_bytes`` each.

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
)";

constexpr const char *export_pieces =
    R"(The envelope of ``export`` as read-only pieces, most of them views of the slab.

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
)";

constexpr const char *export_parts = "The iterator of Pool.export_iter.";

} // namespace kvpool::docs
