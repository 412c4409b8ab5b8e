"""Traces that name the blocks of each prompt: Mooncake's and Qwen-Bailian's.

Mooncake (Qin et al., FAST '25; JSON lines): ``timestamp`` in milliseconds, ``input_length``,
``output_length``, ``hash_ids``: one for each 512 tokens of the prompt.

Qwen-Bailian (Wang et al., ATC '25; JSON lines): ``chat_id``, ``parent_chat_id`` (-1: none),
``timestamp`` in seconds, ``input_length``, ``output_length``, ``type``, ``turn``, ``hash_ids``: one
for each 16 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from ..request import MAX_TOKENS, Request, n_blocks_of
from .json_lines import Row, json_rows, msgspec
from .source import Problems, Source

__all__ = ["read_bailian", "read_mooncake"]


class _Mooncake(Row, gc=False):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    @property
    def session(self) -> str | None:
        return None


class _Bailian(Row, gc=False):
    chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    parent_chat_id: int = -1
    type: str = ""
    turn: int = 1


def read_mooncake(source: Source, problems: Problems, block_tokens: int) -> Iterator[list[Request]]:
    """Batches of requests, in the order of the file."""
    decoder = msgspec.json.Decoder(_Mooncake)
    for rows in json_rows(source, decoder, problems, _checked(block_tokens)):
        yield _requests(rows, 1e-3, block_tokens, None)


def read_bailian(source: Source, problems: Problems, block_tokens: int) -> Iterator[list[Request]]:
    """The same; a request's session is the first chat of its conversation."""
    decoder = msgspec.json.Decoder(_Bailian)
    roots: dict[int, int] = {}
    for rows in json_rows(source, decoder, problems, _checked(block_tokens)):
        sessions = []
        for row in rows:
            root = roots.get(row.parent_chat_id, row.parent_chat_id)
            roots[row.chat_id] = root = row.chat_id if root < 0 else root
            sessions.append(str(root))
        while len(roots) > 1_000_000:  # conversations that ended long ago
            del roots[next(iter(roots))]
        yield _requests(rows, 1.0, block_tokens, sessions)


def _checked(block_tokens: int) -> Any:
    def why_bad(row: Any) -> str | None:
        if not 1 <= row.input_length <= MAX_TOKENS:
            return f"input_length is {row.input_length}, expected 1 to {MAX_TOKENS}"
        if not 0 <= row.output_length <= MAX_TOKENS:
            return f"output_length is {row.output_length}, expected 0 to {MAX_TOKENS}"
        if not abs(row.timestamp) < 1e18:  # also NaN
            return f"timestamp is {row.timestamp}"
        n, full = len(row.hash_ids), row.input_length // block_tokens
        if n not in (full, n_blocks_of(row.input_length, block_tokens)):
            return (
                f"hash_ids has {n} blocks, expected {n_blocks_of(row.input_length, block_tokens)} "
                f"of {block_tokens} tokens for input_length {row.input_length} (--block-tokens?)"
            )
        if n and not 0 <= min(row.hash_ids) <= max(row.hash_ids) < 2**64:
            return "hash_ids: an id is not in 0..2**64-1"
        return None

    return why_bad


def _requests(
    rows: list[Any], unit_s: float, block_tokens: int, sessions: list[str] | None
) -> list[Request]:
    """All ids at once: an array for each request would cost more than the parsing."""
    lists = [row.hash_ids for row in rows]
    ends = np.cumsum([len(ids) for ids in lists]).tolist()
    flat = np.fromiter(chain.from_iterable(lists), np.uint64, ends[-1] if ends else 0)
    requests, begin = [], 0
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        ids = flat[begin:end]
        begin = end
        if len(ids) * block_tokens < row.input_length:  # a partial block without a name
            ids = np.append(ids, np.uint64(_no_name(row, i)))
        requests.append(
            Request(
                row.timestamp * unit_s,
                ids,
                row.input_length,
                row.output_length,
                sessions[i] if sessions else None,
            )
        )
    return requests


def _no_name(row: Any, i: int) -> int:
    """A name that nothing else in the trace has, but by accident."""
    return hash((row.timestamp, row.input_length, row.output_length, i)) & (2**63 - 1)
