"""What the package's tests import: the format's worked example, and a registered block."""

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

MakePool = Callable[..., kvpool.Pool]


def registered(pool: kvpool.Pool, hash: int, value: float = 0.0) -> int:
    """A block that is held, full and registered under `hash`."""
    block = pool.alloc()
    pool.block(block)[:] = value
    pool.set_fill(block, pool.block_tokens)
    assert pool.register(block, hash)
    return block
