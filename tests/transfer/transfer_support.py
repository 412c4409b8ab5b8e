"""Two sides with pools of their own, content that follows from the tokens, and patience."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvpool
from kvpool.transfer import Chunk, KvReceiver, chunks

#: The example of the protocol: P is 128, an envelope of one block 172 bytes.
SHAPE = {"block_tokens": 4, "n_layers": 2, "n_kv_heads": 1, "head_dim": 4}
ENVELOPE_BYTES = 172


class Side:
    """A pool, its manager, and what computes K and V."""

    def __init__(self, n_blocks: int = 64, **options: Any) -> None:
        shape = {name: options.pop(name, value) for name, value in SHAPE.items()}
        self.pool = kvpool.Pool(n_blocks, **shape)
        self.manager = kvpool.BlockManager(self.pool, **options)

    def content(self, tokens: list[int], namespace: int = 0) -> np.ndarray[Any, Any]:
        """float16 (n_blocks, n_layers, 2, n_kv_heads, block_tokens, head_dim): K and V of each
        position depend on every token up to it, as a model's do."""
        B = self.pool.block_tokens
        n_blocks = -(-len(tokens) // B)
        out = np.zeros((n_blocks, *self.pool.slab.shape[1:]), np.float16)
        state = namespace
        for i, token in enumerate(tokens):
            state = kvpool.block_hash(state, [token])
            values = np.random.default_rng(state).standard_normal(out[0, ..., 0, :].shape)
            out[i // B, ..., i % B, :] = values
        return out

    def prefill(self, tokens: list[int], namespace: int = 0) -> kvpool.Sequence:
        """A sequence whose K and V are computed and committed."""
        seq = self.manager.allocate(tokens, namespace=namespace)
        fresh = seq.n_cached // self.pool.block_tokens
        self.pool.slab[seq.blocks[fresh:]] = self.content(tokens, namespace)[fresh:]
        seq.commit()
        return seq

    def cache(self, tokens: list[int], namespace: int = 0) -> None:
        """Leaves the full blocks of a prompt cached."""
        self.prefill(tokens, namespace).free()

    def holds(self, seq: kvpool.Sequence, tokens: list[int], namespace: int = 0) -> bool:
        """Whether a sequence has the K and V of these tokens, bit for bit."""
        expected, found = self.content(tokens, namespace), self.pool.slab[seq.blocks]
        tail = len(tokens) % self.pool.block_tokens
        if tail:
            expected[-1, ..., tail:, :] = found[-1, ..., tail:, :]
        return seq.tokens.tolist() == list(tokens) and bool((expected == found).all())

    @property
    def blocks(self) -> tuple[int, int, int]:
        """free, used, cached."""
        return self.pool.stats[:3]


def eventually(condition: Callable[[], object], what: str = "", timeout_s: float = 10.0) -> None:
    """Waits for something that another thread or process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what or condition
        time.sleep(0.005)


@contextlib.contextmanager
def unchanged(*sides: Side) -> Iterator[None]:
    """Whatever happens inside, afterwards each pool has its blocks where they were."""
    before = [side.blocks for side in sides]
    yield
    eventually(
        lambda: [side.blocks for side in sides] == before,
        f"before {before}, afterwards {[side.blocks for side in sides]}",
    )
    for side in sides:
        side.manager.check()


def send(receiver: KvReceiver, handle: str, seq: kvpool.Sequence, **options: Any) -> Any:
    """A push without a network; the ack. Frees the sequence."""
    with seq, receiver.begin() as push:
        ack = None
        for chunk in chunks(handle, seq, **options):
            ack = push.add(chunk)
        return ack


def altered(chunk: Chunk, **fields: Any) -> Chunk:
    """A chunk with other fields, and a checksum that fits the payload unless that is given."""
    if "payload" in fields and "crc32c" not in fields:
        fields["crc32c"] = kvpool.crc32c(fields["payload"]) if fields["payload"] else 0
    return chunk._replace(**fields)


def raw_push(address: str, requests: Iterator[bytes]) -> Any:
    """PushKv with any bytes as its messages."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        return channel.stream_unary("/tl.kv.v1.KvTransferService/PushKv")(requests, timeout=20)
