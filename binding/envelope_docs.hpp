// What Python says about the functions of envelope.cpp. The examples run as doctests.
#pragma once

namespace kvpool::docs {

constexpr const char *envelope_header =
    R"(An envelope's header, and the reader rules of formats/kv-block.md in steps.

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
)";

constexpr const char *envelope_check =
    R"(All reader rules in their order; the header of bytes that keep to them.

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
kvpool.errors.CorruptEnvelope: tl_kv_envelope_check: length 31, an envelope has at least 32 bytes \
(rule 1)
)";

constexpr const char *envelope_accept =
    R"(Rules 4 and 5: version, dtype, and the dimensions that ``shape`` (a Pool, or four integers) has.

Raises CorruptEnvelope or ShapeMismatch.)";

constexpr const char *envelope_records =
    R"(Rule 6 for blocks ``first`` to ``first + count - 1``.

``records`` has 12 bytes for each of them, the hash and n_tokens, at offsets 0, ``stride``, ....
Raises CorruptEnvelope; InvalidArgument when the buffer or the envelope ends before.)";

constexpr const char *envelope_crc =
    R"(Rule 3: the checksum that the last four bytes store against that of all bytes before them.

Raises CorruptEnvelope.)";

constexpr const char *crc32c_combine =
    R"(The CRC-32C of a then b, from those of a and of b and the length of b in bytes.

About 100 ns, whatever the length. The CRC of a run of zeros follows from those of shorter runs, so
the holes of a sparse file need not be read.

>>> import kvpool.wire
>>> data = b"123456789"
>>> kvpool.crc32c(data) == kvpool.wire.crc32c_combine(
...     kvpool.crc32c(data[:4]), kvpool.crc32c(data[4:]), 5)
True
)";

} // namespace kvpool::docs
