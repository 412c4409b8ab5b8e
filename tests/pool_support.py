"""What the package's tests import: worked examples, and a registered block."""

from __future__ import annotations

from collections.abc import Callable

import kvpool

# The worked example of formats/kv-block.md: block_tokens 2, one layer, one head, head_dim 2.
H0 = 0xA91AB0C1027B9366  # tokens 1 2
H1 = 0x03DF829571605C60  # tokens 1 2 3 4
ENVELOPE = bytes.fromhex(
    "544c4b56 01000100 01000000 02000000 01000000 01000000 02000000"
    "66937b02c1b01aa9 02000000"
    "003c004000420044 003800bc00000034"
    "1c540b4f"
)

# Two prompts of one block of 16 tokens with one name: the collision of docs/prefix-caching.md.
_VICTIM = [1, 734, 29889, 4061, 310, 14991, 278, 3186, 29892, 1438, 338, 278, 5613, 9508, 310, 278]
COLLIDING = (_VICTIM, [*_VICTIM[:9], 3724, 7590, 12543, 11406, 4726, 890, 3852])

MakePool = Callable[..., kvpool.Pool]


def registered(pool: kvpool.Pool, hash: int, value: float = 0.0) -> int:
    """A block that is held, full and registered under `hash`."""
    block = pool.alloc()
    pool.block(block)[:] = value
    pool.set_fill(block, pool.block_tokens)
    assert pool.register(block, hash)
    return block
