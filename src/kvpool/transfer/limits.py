"""What a receiver holds at most, what a transfer has counted, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ..errors import InvalidArgument, TransferError

__all__ = [
    "KV_FORMAT",
    "MAX_PAYLOAD_BYTES",
    "Ack",
    "Limits",
    "Pending",
    "TransferRefused",
    "TransferStats",
]

#: The only kv_format there is: payloads are envelopes of formats/kv-block.md, version 1.
KV_FORMAT = 1
#: The largest payload of a chunk.
MAX_PAYLOAD_BYTES = 4 << 20
_MAX_HANDLE_CHARS = 128


def handle_fault(handle: Any) -> str | None:
    """What is wrong with a handle_id; None for a good one.

    >>> handle_fault("a" * 128) is None, handle_fault(7)
    (True, 'handle_id: expected a str, found int')
    """
    if not isinstance(handle, str):
        return f"handle_id: expected a str, found {type(handle).__name__}"
    if 1 <= len(handle) <= _MAX_HANDLE_CHARS and handle.isprintable():
        return None
    return (
        f"handle_id: expected 1 to {_MAX_HANDLE_CHARS} printable characters, "
        f"found {len(handle)}: {shown(handle)}"
    )


def shown(value: object) -> str:
    """``repr`` for an error message. What a peer sent can be megabytes, and a gRPC status that is
    longer than the metadata may be reaches nobody.

    >>> shown("a" * 1000) == repr("a" * 128) + "..."
    True
    """
    if isinstance(value, str) and len(value) > _MAX_HANDLE_CHARS:
        return repr(value[:_MAX_HANDLE_CHARS]) + "..."
    return repr(value)


def check_numbers(settings: Any, least: float, most: float) -> None:
    """InvalidArgument for a field of a dataclass that is no number, or out of range: a whole one
    from 1 where it is declared ``int``, else from ``least`` to ``most``. None passes where it may.
    """
    for field in fields(settings):
        value, is_whole = getattr(settings, field.name), str(field.type).startswith("int")
        if value is None and "None" in str(field.type):
            continue
        kinds = int if is_whole else (int, float)
        low, high = (1, 2**31 - 1) if is_whole else (least, most)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            what = "a whole number" if is_whole else "a number"
            raise InvalidArgument(
                f"{type(settings).__name__}: {field.name}: expected {what} from {low:g} to "
                f"{high:.10g}, found {value!r}"
            )


class TransferRefused(TransferError):
    """A peer said no, or a receiver says it. ``code`` is the name of the gRPC status.

    >>> str(TransferRefused("NOT_FOUND", "block 00000000000000a7 is not here"))
    'NOT_FOUND: block 00000000000000a7 is not here'
    """

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code, self.details = code, details


@dataclass(frozen=True)
class Limits:
    """Bounds on what pushes may hold. Each is refused by its own message when it is met.

    Args:
        max_pushes: pushes in flight at a time.
        max_handles: pushes in flight and complete ones that nobody has claimed yet, together.
        max_blocks: blocks of one push.
        max_held_blocks: blocks that all of these hold, together. None: all blocks of the pool but
            its manager's watermark.
        max_hashes: names asked for in one HasBlocks.
        ttl_s: seconds that a complete push waits to be claimed.
        idle_s: seconds that a push may be silent between two chunks.

    >>> Limits(ttl_s=0)
    Traceback (most recent call last):
    kvpool.errors.InvalidArgument: Limits: ttl_s: expected a number from 0.001 to inf, found 0
    """

    max_pushes: int = 64
    max_handles: int = 1024
    max_blocks: int = 65_536
    max_held_blocks: int | None = None
    max_hashes: int = 65_536
    ttl_s: float = 60.0
    idle_s: float = 30.0

    def __post_init__(self) -> None:
        check_numbers(self, 0.001, float("inf"))


class Ack(NamedTuple):
    """KvAck: blocks that came with a payload, and blocks taken by their names."""

    handle_id: str
    blocks_received: int
    blocks_deduped: int


class Pending(NamedTuple):
    """A complete push that nobody has claimed. ``age_s``: seconds since its last chunk."""

    handle_id: str
    n_blocks: int
    n_tokens: int
    age_s: float


class TransferStats(NamedTuple):
    """Counters of one side since it was made, and what it holds now.

    A sender has sent, a receiver received: ``bytes`` of payloads, ``blocks_sent`` with a payload
    and ``blocks_deduped`` without. The numbers of a push that fails count as far as it came.
    """

    bytes: int = 0
    blocks_sent: int = 0
    blocks_deduped: int = 0
    pushes: int = 0
    """Complete ones."""
    failed: int = 0
    claimed: int = 0
    released: int = 0
    expired: int = 0
    n_pushing: int = 0
    """In flight now."""
    n_pending: int = 0
    """Complete, and not claimed yet."""
    held_blocks: int = 0
    """Blocks of both."""
