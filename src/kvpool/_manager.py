"""What a block manager answers with: results with names instead of positions."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["BlockEvent", "EventType", "Fit", "ManagerStats"]


class Fit(NamedTuple):
    """What ``BlockManager.allocate`` would do with a prompt now.

    ``fits``: it would succeed. ``n_cached``: tokens it would take from the prefix index.
    ``n_new``: blocks it would allocate. The two numbers are there in both cases.

    >>> import kvpool
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=1)
    >>> kvpool.BlockManager(pool).can_allocate([1, 2, 3])
    Fit(fits=True, n_cached=0, n_new=2)
    """

    fits: bool
    n_cached: int
    n_new: int


class ManagerStats(NamedTuple):
    """Counters of a block manager since it was made, and what it holds now.

    >>> import kvpool
    >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=1)
    >>> mgr = kvpool.BlockManager(pool)
    >>> for prompt in (range(1, 11), [*range(1, 9), 99, 98, 97]):
    ...     with mgr.allocate(prompt) as seq:
    ...         seq.commit()
    >>> stats = mgr.stats
    >>> stats.hit_tokens, stats.prompt_tokens, round(stats.hit_rate, 3)
    (8, 21, 0.381)
    """

    prompt_tokens: int
    """Tokens of all allocated prompts, resumed ones excepted."""
    hit_tokens: int
    """Of those, tokens that came from the prefix index."""
    hit_rate: float
    """hit_tokens / prompt_tokens; 0.0 before the first prompt."""
    hit_blocks: int
    """hit_tokens in blocks."""
    stored: int
    """Blocks that became findable."""
    removed: int
    """Findable blocks that stopped being so: evicted, reset."""
    duplicates: int
    """Full blocks that stayed private because an equal one was findable."""
    collisions: int
    """Full blocks that stayed private because different content held their name: forgeries."""
    unproven: int
    """Full blocks that stayed private because the holder of their name has no proof: imported and
    not adopted, or of before a reset."""
    copies: int
    """Blocks copied because they were shared or immutable."""
    refused: int
    """Calls that raised PoolFull."""
    events_lost: int
    """Events dropped because nobody drained them."""
    evictions: int
    """Cached blocks of the pool that were reclaimed for new data, modulo 2**32."""
    n_seqs: int
    """Sequences alive now."""
    n_pins: int
    """Pins in force at the last call."""
    n_findable: int
    """Blocks in the index now."""
    peak_seqs: int
    """The most sequences, pins among them, that were alive at once."""
    peak_used: int
    """The most blocks of the pool that were in use at once, as the manager saw them."""


class EventType(IntEnum):
    """What a BlockEvent tells; the numbers are those of ``tinyllm/kv_seq.h``.

    >>> import kvpool
    >>> kvpool.EventType.STORED == 1
    True
    """

    STORED = 1
    REMOVED = 2
    CLEARED = 3


class BlockEvent(NamedTuple):
    """A change of what is findable, from ``BlockManager.drain_events``.

    ``number`` grows by one from 0; a gap means that events were lost. By type:

    - STORED: ``block`` became findable under ``hash``, behind ``parent`` (its namespace for the
      first block of a prompt), for these ``tokens``;
    - REMOVED: the block that was findable under ``hash`` is not any more; ``parent`` is 0 and
      ``tokens`` empty;
    - CLEARED: a reset of everything; ``hash`` and ``parent`` are 0 and ``block`` is None.

    >>> import kvpool
    >>> pool = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=1)
    >>> mgr = kvpool.BlockManager(pool, events=True)
    >>> seq = mgr.allocate([1, 2, 3])
    >>> seq.commit()
    >>> [event] = mgr.drain_events()
    >>> event.number, event.type.name, hex(event.hash), event.parent, event.block, event.tokens
    (0, 'STORED', '0xa91ab0c1027b9366', 0, 0, (1, 2))
    >>> seq.free()
    """

    number: int
    type: EventType
    hash: int
    parent: int
    block: int | None
    tokens: tuple[int, ...]
