"""Traces of token ids, and logs of KV events: what was computed, by its tokens or its hashes.

Token ids (JSON lines): a list of ids, or an object with ``tokens`` (or ``token_ids``,
``prompt_token_ids``), and, where known, ``timestamp`` in seconds, ``output_length``, ``session``,
``n``.

KV events (JSON lines): what vLLM publishes, one event or one batch a line, a batch as an object
with ``ts`` and ``events`` or as the array ``[ts, events, rank]``. A ``BlockStored`` event is taken
as one request: the blocks before it, which are known from earlier events, and those it stores.
Requests that stored nothing, because all of their prompt was there, leave no event, so the hit rate
of such a log is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

import kvpool

from ..request import MAX_TOKENS, Request, make_request
from .json_lines import Row, json_rows, msgspec
from .source import Problems, Source

__all__ = ["read_events", "read_tokens"]


class _Prompt(Row, gc=False):
    tokens: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    timestamp: float = 0.0
    output_length: int = 0
    session: str | int | None = None
    n: int = 1

    @property
    def prompt(self) -> list[int]:
        for ids in (self.tokens, self.token_ids, self.prompt_token_ids):
            if ids is not None:
                return ids
        return []


def read_tokens(source: Source, problems: Problems, block_tokens: int) -> Iterator[list[Request]]:
    """Batches of requests; the ids of full blocks are the format's chained hashes."""
    decoder = msgspec.json.Decoder(list[int] | _Prompt)

    def why_bad(row: Any) -> str | None:
        tokens = row if isinstance(row, list) else row.prompt
        if not 1 <= len(tokens) <= MAX_TOKENS:
            return "no tokens: expected a list of ids, or an object with tokens"
        if not 0 <= min(tokens) <= max(tokens) < 2**32:
            return "tokens: an id is not in 0..2**32-1"
        if isinstance(row, list):
            return None
        if not (0 <= row.output_length <= MAX_TOKENS and 1 <= row.n <= 1024):
            return f"output_length is {row.output_length} and n {row.n}"
        return None if abs(row.timestamp) < 1e18 else f"timestamp is {row.timestamp}"

    for rows, _ in json_rows(source, decoder, problems, why_bad):
        batch = []
        for row in rows:
            if isinstance(row, list):
                row = _Prompt(tokens=row)
            tokens = np.array(row.prompt, np.uint32)
            ids = kvpool.block_hashes(tokens, block_tokens)
            tail = tokens[len(ids) * block_tokens :]
            if len(tail):
                parent = ids[-1] if len(ids) else 0
                ids = np.append(ids, np.uint64(kvpool.block_hash(parent, tail)))
            session = None if row.session is None else str(row.session)
            more = {"session": session, "n": row.n}
            batch.append(make_request(row.timestamp, ids, len(tokens), row.output_length, **more))
        yield batch


Hash = int | str


class _Event(Row, gc=False):
    type: str = ""
    block_hashes: tuple[Hash, ...] = ()
    parent_block_hash: Hash | None = None
    block_size: int = 0


class _Batch(Row, gc=False):
    ts: float = 0.0
    events: list[_Event] | None = None
    type: str = ""  # or an event by itself
    block_hashes: tuple[Hash, ...] = ()
    parent_block_hash: Hash | None = None
    block_size: int = 0


def _name(value: Hash) -> int:
    if isinstance(value, int):
        return value & (2**64 - 1)
    return int.from_bytes(blake2b(value.encode(), digest_size=8).digest(), "little")


def read_events(source: Source, problems: Problems, block_tokens: int) -> Iterator[list[Request]]:
    """Batches of requests, one for each BlockStored."""
    decoder = msgspec.json.Decoder(_Batch | list[Any])
    parents: dict[int, int | None] = {}  # of blocks that are stored now

    def why_bad(row: Any) -> str | None:
        try:
            ts, events = _events(row)
        except (msgspec.ValidationError, IndexError, TypeError, ValueError, OverflowError) as error:
            return f"no batch of KV events: {error}"
        if not abs(ts) < 1e18:
            return f"ts is {ts}"
        for event in events:
            if event.type not in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
                return f"an event of type {event.type!r}"
            if event.type == "BlockStored" and event.block_size not in (0, block_tokens):
                return (
                    f"block_size is {event.block_size}, the log's is {block_tokens} "
                    "(--block-tokens?)"
                )
        return None

    for rows, _ in json_rows(source, decoder, problems, why_bad):
        batch = []
        for row in rows:
            ts, events = _events(row)
            for event in events:
                ids = _apply(parents, event)
                if ids is not None:
                    batch.append(make_request(ts, ids, len(ids) * block_tokens))
        if batch:
            yield batch


def _events(row: Any) -> tuple[float, list[Any]]:
    if isinstance(row, list):
        return float(row[0]), msgspec.convert(row[1], list[_Event])
    if row.events is not None:
        return row.ts, row.events
    return row.ts, [row]


def _apply(parents: dict[int, int | None], event: Any) -> Any:
    """The request that a BlockStored stands for; None for other events."""
    names = [_name(value) for value in event.block_hashes]
    if event.type == "AllBlocksCleared":
        parents.clear()
    elif event.type == "BlockRemoved":
        for name in names:
            parents.pop(name, None)
    elif names:
        before = None if event.parent_block_hash is None else _name(event.parent_block_hash)
        prefix: list[int] = []
        at = before
        while at is not None:
            prefix.append(at)
            at = parents.get(at)
        above = set(prefix)
        for name in names:
            if name not in above:  # else the log goes in circles, which no chain of hashes does
                parents[name] = before
            above.add(name)
            before = name
        return np.array([*reversed(prefix), *names], np.uint64)
    return None
