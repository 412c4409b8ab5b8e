"""A sequence to a file and back: ``Sequence.save`` and ``BlockManager.load``.

save   tokens, namespace -> seal     blocks -> pieces of the slab -> write_file
load   the whole file is checked     allocate: what is findable is taken, the rest is new blocks
       payloads -> those blocks      commit: findable, with a proof from the tokens
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool import (
    BlockManager,
    CorruptEnvelope,
    InvalidArgument,
    Sequence,
    StorageError,
    block_hashes,
    crc32c,
)
from kvpool._core import EnvelopeHeader

from .envelope import HEADER_BYTES, RECORD_BYTES, TRAILER_BYTES
from .files import EnvelopeFile, new_file, writev_all
from .seal import SEAL_BYTES, Seal, token_digests

if TYPE_CHECKING:
    from .files import Path

__all__ = ["load", "save"]

_CHUNK = 1 << 20


def save(seq: Sequence, path: Path) -> None:
    """What ``Sequence.save(path)`` calls; see there.

    >>> import os, tempfile
    >>> import kvpool
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> with kvpool.BlockManager(pool).allocate([1, 2, 3]) as seq:
    ...     save(seq, os.path.join(tempfile.mkdtemp(), "session.tlks"))
    Traceback (most recent call last):
    kvpool.errors.InvalidArgument: save: nothing of the sequence is computed; commit first
    """
    n_computed = -1
    while seq.n_computed != n_computed:  # another thread may commit in between
        n_computed = seq.n_computed
        parts = seq.export_iter(_CHUNK)
    if n_computed == 0:
        raise InvalidArgument("save: nothing of the sequence is computed; commit first")
    with new_file(path) as fd:
        os.lseek(fd, SEAL_BYTES, os.SEEK_SET)  # the seal has the checksum, which comes last
        part = next(parts)
        header = EnvelopeHeader(part)
        writev_all(fd, [part])
        for part in parts:
            writev_all(fd, [part])
        crc = int.from_bytes(part[-TRAILER_BYTES:], "little")
        digest = token_digests(seq.tokens[:n_computed], header.block_tokens, seq.namespace)[-1]
        seal = Seal(seq.namespace, 0, n_computed, digest, header.size_bytes, crc)
        os.pwrite(fd, seal.pack(), 0)


def load(manager: BlockManager, path: Path, tokens: Any, *, namespace: Any = 0) -> Sequence:
    """What ``BlockManager.load(path, tokens, namespace=...)`` calls; see there.

    >>> import kvpool
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> load(kvpool.BlockManager(pool), "nowhere", [1, 2, 3])
    Traceback (most recent call last):
    kvpool.errors.StorageError: nowhere: No such file or directory
    """
    manager.can_allocate(tokens, namespace=namespace)  # refuses what is no token, no namespace
    pool = manager.pool
    names = block_hashes(tokens, pool.block_tokens, namespace)
    row = np.array(tokens, np.uint32)
    with EnvelopeFile(path) as file:
        file.verify(pool)
        seal = file.seal
        if seal is None:
            raise CorruptEnvelope(
                f"{file.path}: an envelope without a seal, which does not say what its tokens are; "
                "for those you know to be right: BlockManager.import_sequence"
            )
        _check_tokens(seal, row, int(namespace), pool.block_tokens)
        _check_blocks(file, seal, names, pool.block_tokens)
        seq = manager.allocate(row, namespace=namespace, resumed=True)
        try:
            _fill(manager, seq, file, seal)
            seq.commit(max(seal.n_tokens, seq.n_cached))
        except CorruptEnvelope as error:
            seq.free()
            raise StorageError(f"{file.path}: changed while it was read ({error})") from error
        except BaseException:
            seq.free()
            raise
    return seq


def _check_tokens(
    seal: Seal, tokens: NDArray[np.uint32], namespace: int, block_tokens: int
) -> None:
    if seal.namespace != namespace:
        raise InvalidArgument(
            f"load: namespace: expected {seal.namespace:#x}, that of the file, found {namespace:#x}"
        )
    if seal.first_token != 0:
        raise CorruptEnvelope(f"load: the file begins at token {seal.first_token}, expected 0")
    if len(tokens) < seal.n_tokens:
        raise InvalidArgument(
            f"load: tokens: expected at least the {seal.n_tokens} of the file, found {len(tokens)}"
        )
    digests = token_digests(tokens[: seal.n_tokens], block_tokens, namespace)
    if not digests or digests[-1] != seal.digest:
        raise InvalidArgument(f"load: tokens: other than the {seal.n_tokens} of the file")


def _check_blocks(
    file: EnvelopeFile, seal: Seal, names: NDArray[np.uint64], block_tokens: int
) -> None:
    """The envelope has the positions that the seal says, under the names of the tokens."""
    at = 0
    for hashes, n_tokens in file.records():
        end = at + len(hashes)
        want = np.minimum(block_tokens, seal.n_tokens - block_tokens * np.arange(at, end))
        here = np.zeros(len(hashes), np.uint64)
        here[: max(0, min(end, len(names)) - at)] = names[at:end]
        wrong = np.flatnonzero((n_tokens != want) | ((hashes != 0) & (hashes != here)))
        if len(wrong):
            i = wrong[0]
            raise CorruptEnvelope(
                f"{file.path}: block {at + i} is not that of its tokens: {n_tokens[i]} positions "
                f"named {hashes[i]:016x}, expected {want[i]} named {here[i]:016x} or 0"
            )
        at = end
    if at != -(-seal.n_tokens // block_tokens):
        raise CorruptEnvelope(f"{file.path}: {at} blocks, the seal is of {seal.n_tokens} tokens")


def _fill(manager: BlockManager, seq: Sequence, file: EnvelopeFile, seal: Seal) -> None:
    """The payloads go into the sequence's own blocks, those that it found are passed over.

    Some blocks at a time, or one large one: while they are in the processor's cache they are summed
    and copied.
    """
    pool, header, slab = manager.pool, file.header, manager.pool.slab
    blocks, n_found = seq.blocks, seq.n_cached // pool.block_tokens
    record = RECORD_BYTES + header.block_bytes
    step = max(1, _CHUNK // record)
    buffer = memoryview(bytearray(min(step, header.n_blocks) * record))
    file.read(0, start := memoryview(bytearray(HEADER_BYTES)))
    crc = crc32c(start)
    for first in range(0, header.n_blocks, step):
        count = min(step, header.n_blocks - first)
        view = buffer[: count * record]
        if not file.read(HEADER_BYTES + first * record, view):
            view[:] = bytes(len(view))  # a hole: and no record is in one
        crc = crc32c(view, crc)
        skipped = min(count, max(0, n_found - first))
        rows = np.frombuffer(view, np.uint8).reshape(count, record)[skipped:, RECORD_BYTES:]
        mine = blocks[first + skipped : first + count]
        slab[mine] = rows.view("<f2").reshape(-1, *slab.shape[1:])
    if crc != seal.envelope_crc32c or file.stored_crc() != crc:
        raise CorruptEnvelope(f"CRC-32C {crc:08x}, expected {seal.envelope_crc32c:08x}")
