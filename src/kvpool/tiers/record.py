"""What a tier stores: one block in a record that proves what it is of, under a key that no other
prefix has.

    record = [ head 64 ] [ seal 80 ] [ envelope of one block ]            formats/kv-record.md

    head       layout: everything two engines must agree on to read each other's blocks; and a tag,
               if the fleet has a secret
    seal       namespace, and a digest of the whole prefix up to this block's end (kvpool.wire)
    envelope   the block's name, K and V, CRC-32C

The manager finds prefixes by a proof that depends on a secret of the process, so it cannot travel.
What travels is the seal's digest: BLAKE2b-256, chained over the namespace and the tokens of every
block. Whoever comes with the prompt computes the same digest, from any process at any time, and
nobody finds two prefixes that share one. So a record is right for a prompt if it is under the
prompt's key, whole, and sealed with the prompt's digest; anything else is a miss. The reasons are
in docs/design/tier-records.md.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool import (
    CorruptEnvelope,
    InvalidArgument,
    Pool,
    ShapeMismatch,
    block_hashes,
    crc32c,
)
from kvpool.wire import EnvelopeHeader, Seal, token_digests

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HEAD_BYTES", "Key", "Layout", "RecordRefused", "verify_record"]

HEAD_BYTES, SEAL_BYTES = 64, 80
ENVELOPE_AT = HEAD_BYTES + SEAL_BYTES
PAYLOAD_AT = ENVELOPE_AT + 28 + 12

_MAGIC, _VERSION, _TAGGED = b"TLKR", 1, 1
_HEAD = struct.Struct("<4sHH16s32s4x")  # and a CRC-32C of these 60 bytes
_TAG_AT, _TAG_END = 24, 56
_PERSON = b"kvpool.layout.1"


class RecordRefused(CorruptEnvelope):
    """What a tier gave for a key is not that block: a miss, and counted by ``reason``.

    ``reason`` is one of ``RecordRefused.REASONS``.
    """

    REASONS = (
        "bytes",  # no contiguous bytes at all
        "length",  # cut short, or longer than it says
        "head",  # no record, or a damaged head
        "version",  # of a later version of the record
        "layout",  # of another model, shape, dtype or fleet
        "tag",  # not written with the fleet's secret
        "seal",  # a damaged seal, or one of another envelope
        "envelope",  # an envelope that breaks its rules: its checksum, usually
        "shape",  # an envelope of other dimensions
        "digest",  # of another prefix or namespace
        "hash",  # under another name, or not one full block
    )

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"record: {text}")
        self.reason = reason


class Key(NamedTuple):
    """Where a block is in a tier. Two blocks share a key only if they are the same block.

    >>> key = Layout(2, n_layers=1, n_kv_heads=1, head_dim=2).keys([1, 2, 3])[0]
    >>> Key.parse(key.text) == key
    True
    """

    layout: bytes
    """16 bytes, ``Layout.id``."""
    namespace: int
    """The root that the prefix was computed under."""
    hash: int
    """The block's name: the format's chained hash, which is inside the envelope too."""
    digest: bytes
    """32 bytes, of the whole prefix up to this block's end: ``kvpool.wire.token_digests``."""

    @property
    def text(self) -> str:
        """137 characters a-z, 0-9 and ``-``, for stores with names. Prefixes of it group blocks by
        layout, then by namespace."""
        return (
            f"tlkv1-{self.layout.hex()}-{self.namespace:016x}-{self.hash:016x}-{self.digest.hex()}"
        )

    @classmethod
    def parse(cls, text: str) -> Key:
        """The key with that text. InvalidArgument."""
        try:
            version, layout, namespace, hash_, digest = text.split("-")
            key = cls(
                bytes.fromhex(layout), int(namespace, 16), int(hash_, 16), bytes.fromhex(digest)
            )
        except ValueError:
            key = None
        if key is None or version != "tlkv1" or key.text != text:
            raise InvalidArgument(f"key: expected tlkv1-layout-namespace-hash-digest, found {text}")
        return key


def _field(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


@dataclass(frozen=True)
class Layout:
    """What two engines must agree on to read each other's blocks: a part of every key.

    Args:
        block_tokens, n_layers, n_kv_heads, head_dim: of the pool. The dtype is float16 and the
            format 1, and both are in ``id`` too.
        model, revision: say which weights (and which quantization, which engine's arithmetic) the
            K and V are of. A namespace does the same for each prompt; use at least one of the two.
        secret: at least 16 bytes that the fleet shares, or None. With it every record carries a
            tag, a keyed BLAKE2b of all its bytes, and a record without the right one is a miss:
            who can write to the store but does not know the secret cannot make an engine use
            anything. Costs about a millisecond for each MiB, both ways.

    >>> layout = Layout(16, n_layers=30, n_kv_heads=3, head_dim=64, model="smollm2", revision="1")
    >>> layout.id.hex(), layout.record_bytes
    ('...', 368828)
    >>> [key.hash for key in layout.keys(range(40))] == list(
    ...     __import__("kvpool").block_hashes(range(40)))
    True
    """

    block_tokens: int
    n_layers: int = field(kw_only=True)
    n_kv_heads: int = field(kw_only=True)
    head_dim: int = field(kw_only=True)
    model: str = field(default="", kw_only=True)
    revision: str = field(default="", kw_only=True)
    secret: bytes | None = field(default=None, kw_only=True, repr=False)
    id: bytes = field(init=False)
    """16 bytes: BLAKE2b of all of the above."""

    def __post_init__(self) -> None:
        if self.secret is not None and len(self.secret) < 16:
            raise InvalidArgument(f"secret: expected at least 16 bytes, found {len(self.secret)}")
        for dim in self.shape:
            if not 0 < dim < 1 << 32:
                raise InvalidArgument(f"layout: dimensions are 1 to 2**32 - 1, found {self.shape}")
        known = b"" if self.secret is None else self._keyed(b"kvpool.secret").digest()
        fields = struct.pack("<6I", *self.shape, 1, 1)  # dtype float16, format 1
        fields += _field(self.model) + _field(self.revision) + _field(known)
        digest = hashlib.blake2b(fields, digest_size=16, person=_PERSON).digest()
        object.__setattr__(self, "id", digest)

    @classmethod
    def of(cls, pool: Pool, **options: Any) -> Layout:
        """The layout of a pool's blocks; ``options`` are model, revision and secret."""
        return cls(
            pool.block_tokens, n_layers=pool.n_layers, n_kv_heads=pool.n_kv_heads,
            head_dim=pool.head_dim, **options,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(block_tokens, n_layers, n_kv_heads, head_dim)``, as envelopes have it."""
        return self.block_tokens, self.n_layers, self.n_kv_heads, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's K and V."""
        return 4 * self.block_tokens * self.n_layers * self.n_kv_heads * self.head_dim

    @property
    def record_bytes(self) -> int:
        """Bytes of a record; all records of a layout have as many."""
        return PAYLOAD_AT + self.block_bytes + 4

    def keys(self, tokens: Any, namespace: int = 0) -> list[Key]:
        """The key of each full block of a prompt."""
        names = block_hashes(tokens, self.block_tokens, namespace)
        row = np.array(tokens, np.uint32)[: len(names) * self.block_tokens]
        digests = token_digests(row, self.block_tokens, namespace)
        return [
            Key(self.id, namespace, name, digest)
            for name, digest in zip(names.tolist(), digests, strict=True)
        ]

    def _keyed(self, data: Buffer) -> Any:
        assert self.secret is not None
        key = self.secret if len(self.secret) <= 64 else hashlib.blake2b(self.secret).digest()
        return hashlib.blake2b(data, digest_size=32, key=key)

    def _tag(self, record: memoryview) -> bytes:
        tag = self._keyed(record[:_TAG_AT])
        tag.update(record[_TAG_END : HEAD_BYTES - 4])
        tag.update(record[HEAD_BYTES:])
        return bytes(tag.digest())

    def seal(self, record: memoryview, key: Key, index: int) -> None:
        """Makes a record of an envelope: fills the bytes before it.

        ``record`` is a writable view of ``record_bytes`` bytes with the envelope of one full block
        from ``ENVELOPE_AT`` on; it is block ``index`` of its prefix.
        """
        at, end = index * self.block_tokens, (index + 1) * self.block_tokens
        crc = int.from_bytes(record[-4:], "little")
        record[HEAD_BYTES:ENVELOPE_AT] = Seal(
            key.namespace, at, end, key.digest, len(record) - ENVELOPE_AT, crc
        ).pack()
        flags, tag = (_TAGGED, bytes(32)) if self.secret is not None else (0, bytes(32))
        record[: _HEAD.size] = _HEAD.pack(_MAGIC, _VERSION, flags, self.id, tag)
        if self.secret is not None:
            record[_TAG_AT:_TAG_END] = self._tag(record)
        record[_HEAD.size : HEAD_BYTES] = struct.pack("<I", crc32c(record[: _HEAD.size]))

    def open(self, data: Buffer, key: Key) -> NDArray[np.float16]:
        """The K and V of the block ``key`` in a record, as a view of ``data``.

        float16 ``(n_layers, 2, n_kv_heads, block_tokens, head_dim)``. ``data`` must not change
        meanwhile: bytes from elsewhere are copied first. Everything is checked; whatever does not
        agree raises RecordRefused.
        """
        record = memoryview(data).cast("B")
        verify_record(record, key, self)
        payload = np.frombuffer(record, "<f2", self.block_bytes // 2, PAYLOAD_AT)
        return payload.reshape(self.n_layers, 2, self.n_kv_heads, self.block_tokens, self.head_dim)


def verify_record(data: Buffer, key: Key, layout: Layout | None = None) -> None:
    """Holds a whole record to its key. Without a layout its shape and its tag cannot be checked.

    Raises RecordRefused.
    """
    record = memoryview(data).cast("B")
    seal, envelope = check_record(record, key, layout), record[ENVELOPE_AT:]
    try:
        header = EnvelopeHeader.check(envelope, layout.shape if layout is not None else None)
    except ShapeMismatch as error:
        raise RecordRefused("shape", str(error)) from None
    except CorruptEnvelope as error:
        raise RecordRefused("envelope", str(error)) from None
    if seal.envelope_crc32c != header.crc32c:
        raise RecordRefused(
            "seal",
            f"the seal is of envelope {seal.envelope_crc32c:08x}, found {header.crc32c:08x}",
        )
    hash_, n_tokens = struct.unpack_from("<QI", envelope, 28) if header.n_blocks else (0, 0)
    if (header.n_blocks, hash_, n_tokens) != (1, key.hash, header.block_tokens):
        raise RecordRefused(
            "hash",
            f"expected 1 block named {key.hash:016x} of {header.block_tokens} tokens, found "
            f"{header.n_blocks} named {hash_:016x} of {n_tokens}",
        )


def check_record(record: memoryview, key: Key, layout: Layout | None = None) -> Seal:
    """Head and seal of a record against its key: all that needs no look at K and V."""
    if len(record) <= ENVELOPE_AT:
        raise RecordRefused("length", f"{len(record)} bytes, expected more than {ENVELOPE_AT}")
    magic, version, flags, layout_id, tag = _HEAD.unpack(record[: _HEAD.size])
    if magic != _MAGIC:
        raise RecordRefused("head", f'magic {magic.hex(" ")} at offset 0, expected "TLKR"')
    stored, computed = struct.unpack("<I", record[60:64])[0], crc32c(record[:60])
    if stored != computed:
        raise RecordRefused(
            "head", f"CRC-32C {stored:08x} at offset 60, the bytes have {computed:08x}"
        )
    if version != _VERSION:
        raise RecordRefused("version", f"version {version} at offset 4, expected {_VERSION}")
    if layout_id != key.layout:
        raise RecordRefused(
            "layout", f"layout {layout_id.hex()} at offset 8, expected {key.layout.hex()}"
        )
    if layout is not None:
        expected = layout._tag(record) if layout.secret is not None else bytes(32)
        if flags != (layout.secret is not None) or not hmac.compare_digest(tag, expected):
            raise RecordRefused("tag", "the tag at offset 24 is not made with the fleet's secret")
    try:
        seal = Seal.unpack(record[HEAD_BYTES:])
    except CorruptEnvelope as error:
        raise RecordRefused("seal", str(error)) from None
    if seal.envelope_bytes != len(record) - ENVELOPE_AT:
        raise RecordRefused(
            "length",
            f"an envelope of {len(record) - ENVELOPE_AT} bytes, its seal says "
            f"{seal.envelope_bytes}",
        )
    if seal.namespace != key.namespace or seal.digest != key.digest:
        raise RecordRefused(
            "digest",
            f"of prefix {seal.digest.hex()[:16]} in namespace {seal.namespace:x}, expected "
            f"{key.digest.hex()[:16]} in {key.namespace:x}",
        )
    return seal
