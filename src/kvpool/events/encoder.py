"""From what a manager records to the events that travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from ..errors import InvalidArgument
from .wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

__all__ = ["EventEncoder", "NamespaceLabel", "Record"]


class Record(Protocol):
    """One of ``BlockManager.drain_events()``; types as in ``tinyllm/kv_seq.h``."""

    @property
    def number(self) -> int: ...
    @property
    def type(self) -> int: ...
    @property
    def hash(self) -> int: ...
    @property
    def parent(self) -> int: ...
    @property
    def tokens(self) -> Any: ...


_STORED, _REMOVED, _CLEARED = 1, 2, 3


class NamespaceLabel(NamedTuple):
    """What subscribers are told about the prompts under one root, in vLLM's terms.

    ``lora_name`` goes with every block; ``salt`` with the first block of a prompt, as in vLLM.
    """

    lora_name: str | None = None
    lora_id: int | None = None
    salt: str | None = None


class EventEncoder:
    """Turns drained records into events, in order, merging runs of them.

    Args:
        block_tokens: tokens of a block.
        medium: where the blocks are, as subscribers know it: "GPU", "CPU", "STORAGE".
        labels: for roots (``kvpool.namespace``) that subscribers should recognize. The first block
            under a labelled root has no parent and carries the label. Under another root other than
            0 its parent is the root itself, a block that a subscriber has never seen: one that
            knows nothing of namespaces then leaves it alone, which is right, since the prompt in
            question would not hit.

    A gap in the records' numbers (the manager's queue ran over) becomes an AllBlocksCleared: what
    subscribers held is no longer known to be there, and what follows is.

    Raises InvalidArgument, and takes none of the records, where one is of a type it does not know
    or of a block that has not ``block_tokens`` tokens.

    >>> import kvpool, kvpool.events
    >>> pool = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> manager = kvpool.BlockManager(pool, events=True)
    >>> encoder = kvpool.events.EventEncoder(block_tokens=2)
    >>> sequence = manager.allocate([1, 2, 3, 4, 5]); sequence.commit()
    >>> event, = encoder.encode(manager.drain_events())
    >>> [f"{h:016X}" for h in event.block_hashes], event.parent_block_hash, event.token_ids
    (['A91AB0C1027B9366', '03DF829571605C60'], None, [1, 2, 3, 4])
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        medium: str = "GPU",
        labels: Mapping[int, NamespaceLabel] | None = None,
    ) -> None:
        self._block_tokens, self._medium = block_tokens, medium
        self._labels = dict(labels or {})
        if 0 in self._labels:
            raise InvalidArgument("EventEncoder: root 0 is the default namespace and has no label")
        self._labelled: dict[int, NamespaceLabel] = {}  # blocks under a labelled root
        self._next = 0

    def encode(self, records: Iterable[Record]) -> list[KVEvent]:
        """The events of these records, which continue those of the call before."""
        records = list(records)
        for record in records:
            self._validate(record)
        events: list[KVEvent] = []
        for record in records:
            if record.number != self._next:
                self._clear(events)
            self._next = record.number + 1
            if record.type == _STORED:
                self._stored(events, record)
            elif record.type == _REMOVED:
                self._labelled.pop(record.hash, None)
                last = events[-1] if events else None
                if isinstance(last, BlockRemoved):
                    last.block_hashes.append(record.hash)
                else:
                    events.append(BlockRemoved(block_hashes=[record.hash], medium=self._medium))
            else:
                self._clear(events)
        return events

    def _validate(self, record: Record) -> None:
        if record.type not in (_STORED, _REMOVED, _CLEARED):
            raise InvalidArgument(f"EventEncoder: a record of unknown type {record.type!r}")
        if record.type == _STORED and len(record.tokens) != self._block_tokens:
            raise InvalidArgument(
                f"EventEncoder: a block of {len(record.tokens)} tokens, but it was made with "
                f"block_tokens={self._block_tokens}"
            )

    def _clear(self, events: list[KVEvent]) -> None:
        self._labelled.clear()
        events.append(AllBlocksCleared())

    def _stored(self, events: list[KVEvent], record: Record) -> None:
        first = record.parent == 0 or record.parent in self._labels
        label = self._labels.get(record.parent) or self._labelled.get(record.parent)
        keys: tuple[str, ...] | None = None
        if label is not None:
            self._labelled[record.hash] = label
            salt = label.salt if first else None
            keys = tuple(key for key in (label.lora_name, salt) if key is not None) or None
        last = events[-1] if events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == record.parent:
            last.block_hashes.append(record.hash)  # a child: same namespace, same label
            last.token_ids.extend(map(int, record.tokens))
            if last.extra_keys is not None:
                last.extra_keys.append(keys)
            return
        events.append(
            BlockStored(
                block_hashes=[record.hash],
                parent_block_hash=None if first else record.parent,
                token_ids=list(map(int, record.tokens)),
                block_size=self._block_tokens,
                lora_id=label.lora_id if label else None,
                lora_name=label.lora_name if label else None,
                medium=self._medium,
                extra_keys=[keys] if keys else None,
            )
        )
