"""A seal: which tokens an envelope holds, in 80 bytes before it (formats/kv-seal.md).

    sealed envelope = [ seal 80 ] [ envelope ]

An envelope names its full blocks with 64 bits that anyone can collide on purpose, says nothing
about a partial tail's tokens, and does not know its namespace. Whoever keeps envelopes apart from
the tokens seals them, and can tell afterwards whether these bytes are those of that prompt.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool import CorruptEnvelope, crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SEAL_BYTES", "SEAL_MAGIC", "Seal", "token_digests"]

SEAL_BYTES, SEAL_MAGIC = 80, b"TLKS"
_FIELDS = struct.Struct("<4sHHQQQ32sQI")  # and a CRC-32C of these 76 bytes
_PERSON = b"kvpool.seal.1"


def token_digests(
    tokens: NDArray[np.uint32],
    block_tokens: int,
    namespace: int = 0,
    parent: bytes | None = None,
) -> list[bytes]:
    """The digest of the prefix up to the end of each block, the last one being partial perhaps.

    ``tokens`` is uint32 ``(n,)``. The result has ``ceil(n / block_tokens)`` digests of 32 bytes: a
    chain of BLAKE2b-256, so that the digest of a block costs one hash once its parent's is known:
    ``parent`` is that of the block before these tokens, None at the beginning.

    >>> import numpy as np
    >>> tokens = np.arange(5, dtype=np.uint32)
    >>> [digest.hex()[:8] for digest in token_digests(tokens, 4)]
    ['2ca8695a', '36c8b6b8']
    """
    start = struct.pack("<Q", namespace)
    digest = parent or hashlib.blake2b(start, digest_size=32, person=_PERSON).digest()
    data = np.ascontiguousarray(tokens, "<u4").data.cast("B")
    digests = []
    for at in range(0, len(data), 4 * block_tokens):
        block = hashlib.blake2b(digest, digest_size=32, person=_PERSON)
        block.update(data[at : at + 4 * block_tokens])
        digest = block.digest()
        digests.append(digest)
    return digests


class Seal(NamedTuple):
    """What a sealed envelope is of.

    >>> seal = Seal(0, 0, 5, bytes(32), envelope_bytes=60, envelope_crc32c=7)
    >>> Seal.unpack(seal.pack()) == seal
    True
    >>> Seal.unpack(seal.pack()[:-1])
    Traceback (most recent call last):
    kvpool.errors.CorruptEnvelope: seal: length 79, expected at least 80 bytes
    """

    namespace: int
    """The root that the prefix was computed under."""
    first_token: int
    """Where the envelope's first block begins in the prefix."""
    n_tokens: int
    """Where its last position ends: the prefix up to here is what the digest is of."""
    digest: bytes
    """The last of ``token_digests`` of that prefix: 32 bytes."""
    envelope_bytes: int
    """The length of the envelope behind the seal."""
    envelope_crc32c: int
    """Its checksum: a seal before another envelope is told."""

    def pack(self) -> bytes:
        """The 80 bytes."""
        fields = _FIELDS.pack(
            SEAL_MAGIC, 1, 0, self.namespace, self.first_token, self.n_tokens, self.digest,
            self.envelope_bytes, self.envelope_crc32c,
        )  # fmt: skip
        return fields + struct.pack("<I", crc32c(fields))

    @classmethod
    def unpack(cls, data: Buffer) -> Seal:
        """The seal in the first 80 bytes. Raises CorruptEnvelope: no seal, or a damaged one."""
        view = memoryview(data).cast("B")
        if len(view) < SEAL_BYTES:
            raise CorruptEnvelope(f"seal: length {len(view)}, expected at least {SEAL_BYTES} bytes")
        magic, version, reserved, *fields = _FIELDS.unpack(view[: _FIELDS.size])
        if magic != SEAL_MAGIC:
            raise CorruptEnvelope(f'seal: magic {magic.hex(" ")} at offset 0, expected "TLKS"')
        (stored,) = struct.unpack("<I", view[_FIELDS.size : SEAL_BYTES])
        computed = crc32c(view[: _FIELDS.size])
        if stored != computed:
            raise CorruptEnvelope(
                f"seal: CRC-32C {stored:08x} at offset 76, the bytes have {computed:08x}"
            )
        if version != 1 or reserved != 0:
            raise CorruptEnvelope(
                f"seal: version {version} and reserved {reserved} at offset 4, expected 1 and 0"
            )
        seal = cls(*fields)
        if seal.first_token > seal.n_tokens:
            raise CorruptEnvelope(
                f"seal: first_token {seal.first_token} at offset 16, n_tokens is {seal.n_tokens}"
            )
        return seal
