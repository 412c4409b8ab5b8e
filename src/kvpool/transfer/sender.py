"""The prefill side without its network: what of a sequence has to be sent, and as which bytes."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Row
from typing import NamedTuple

from .. import Sequence, block_hashes
from ..errors import ArgumentTypeError, InvalidArgument
from ._chunk import ENVELOPE_CRC, Chunk, decode_chunk, frame
from .limits import KV_FORMAT, MAX_PAYLOAD_BYTES, handle_fault

__all__ = ["Plan", "chunks", "messages"]


class Plan(NamedTuple):
    """The blocks of a sequence's computed tokens, as they travel.

    ``names``: of each block, in order, 0 for a partial tail. They come from the tokens, so that a
    full block which was never registered travels under its name as well. ``envelope_bytes``: of
    each payload.
    """

    names: list[int]
    envelope_bytes: int

    @classmethod
    def of(cls, seq: Sequence) -> Plan:
        """The plan for what is computed of a sequence now.

        Raises:
            InvalidArgument: nothing is computed, or an envelope is larger than a payload may be.

        >>> import kvpool
        >>> pool = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> seq = kvpool.BlockManager(pool).allocate([1, 2, 3]); seq.commit()
        >>> [hex(name) for name in Plan.of(seq).names]
        ['0xa91ab0c1027b9366', '0x0']
        >>> seq.free()
        """
        n, size = seq.n_computed, seq.block_tokens
        if n == 0:
            raise InvalidArgument("push: nothing of the sequence is computed")
        envelope_bytes = len(seq.export_block(0))
        if envelope_bytes > MAX_PAYLOAD_BYTES:
            raise InvalidArgument(
                f"push: a block's envelope has {envelope_bytes} bytes, a payload at most "
                f"{MAX_PAYLOAD_BYTES}: fewer block_tokens"
            )
        names = block_hashes(seq.tokens[:n], size, seq.namespace).tolist()
        return cls(names + [0] * (n % size != 0), envelope_bytes)

    @property
    def full(self) -> list[int]:
        """The names to ask the other side for."""
        return self.names[:-1] if self.names[-1] == 0 else self.names


def messages(
    handle_id: str, seq: Sequence, plan: Plan, present: Row[bool] = ()
) -> Iterator[tuple[bytes, int]]:
    """The KvChunks of a push as bytes, each with the size of its payload, made as they are taken.

    Block i goes without a payload where ``present[i]``. The sequence must stay as it is meanwhile.
    """
    total, size = len(plan.names), plan.envelope_bytes
    for i, name in enumerate(plan.names):
        if i < len(present) and present[i] and name:
            yield frame(handle_id, name, i, total, KV_FORMAT, 0, 0)[0], 0
        else:
            before, after = frame(handle_id, name, i, total, KV_FORMAT, size, ENVELOPE_CRC)
            yield seq.export_block(i, before=before, after=after), size


def chunks(handle_id: str, seq: Sequence, present: Row[bool] = ()) -> Iterator[Chunk]:
    """The same as `Chunk` tuples, for a transport of your own; see ``KvReceiver``.

    >>> import kvpool
    >>> pool = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> seq = kvpool.BlockManager(pool).allocate([1, 2, 3]); seq.commit()
    >>> [(chunk.block_index, len(chunk.payload)) for chunk in chunks("h", seq, [True])]
    [(0, 0), (1, 60)]
    >>> seq.free()
    """
    return (decode_chunk(data) for data, _ in messages(handle_id, seq, Plan.of(seq), present))


def check_names(hashes: Iterable[int]) -> list[int]:
    """Names as a list of integers that fit into the message."""
    names = []
    for i, name in enumerate(hashes):
        try:
            names.append(operator.index(name))
        except TypeError as error:
            raise ArgumentTypeError(
                f"hashes[{i}]: expected an integer, found {type(name).__name__}"
            ) from error
        if not 0 <= names[-1] < 2**64:
            raise InvalidArgument(
                f"hashes[{i}]: expected an integer from 0 to {2**64 - 1}, found {name}"
            )
    return names


def check_handle(handle_id: str | None) -> str:
    """A handle that can be sent; a new one for None."""
    if handle_id is None:
        return uuid.uuid4().hex
    if (fault := handle_fault(handle_id)) is not None:
        raise InvalidArgument(fault)
    return handle_id
