"""Traces that name the blocks of each prompt: Mooncake's and Qwen-Bailian's.

Mooncake (Qin et al., FAST '25; JSON lines): ``timestamp`` in milliseconds, ``input_length``,
``output_length``, ``hash_ids``: one for each 512 tokens of the prompt.

Qwen-Bailian (Wang et al., ATC '25; JSON lines): ``chat_id``, ``parent_chat_id`` (-1: none),
``timestamp`` in seconds, ``input_length``, ``output_length``, ``type``, ``turn``, ``hash_ids``: one
for each 16 tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..request import MAX_TOKENS, UNIT, Request, n_blocks_of
from .json_lines import Row, json_rows, msgspec
from .source import Problems, Source

__all__ = ["read_bailian", "read_mooncake"]

_MAX_TIME = 1e18
_FIELDS = attrgetter("timestamp", "input_length", "output_length", "hash_ids")
_new = tuple.__new__


class _Mooncake(Row, gc=False):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


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
    why_bad = _checked(block_tokens)
    for rows, good in json_rows(
        source, decoder, problems, why_bad, partial(_all_good, block_tokens)
    ):
        yield _requests(good or _columns(rows), 1e-3, block_tokens, [None] * len(rows))


def read_bailian(source: Source, problems: Problems, block_tokens: int) -> Iterator[list[Request]]:
    """The same; a request's session is the first chat of its conversation."""
    decoder = msgspec.json.Decoder(_Bailian)
    why_bad = _checked(block_tokens)
    roots: dict[int, int] = {}
    for rows, good in json_rows(
        source, decoder, problems, why_bad, partial(_all_good, block_tokens)
    ):
        sessions: list[str | None] = []
        for row in rows:
            root = roots.get(row.parent_chat_id, row.parent_chat_id)
            roots[row.chat_id] = root = row.chat_id if root < 0 else root
            sessions.append(str(root))
        while len(roots) > 1_000_000:  # conversations that ended long ago
            del roots[next(iter(roots))]
        yield _requests(good or _columns(rows), 1.0, block_tokens, sessions)


def _checked(block_tokens: int) -> Callable[[Any], str | None]:
    def why_bad(row: Any) -> str | None:
        if not 1 <= row.input_length <= MAX_TOKENS:
            return f"input_length is {row.input_length}, expected 1 to {MAX_TOKENS}"
        if not 0 <= row.output_length <= MAX_TOKENS:
            return f"output_length is {row.output_length}, expected 0 to {MAX_TOKENS}"
        if not abs(row.timestamp) < _MAX_TIME:  # also NaN
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


class _Columns(NamedTuple):
    """Many rows as arrays: one operation on all of them costs as much as one on a row."""

    times: NDArray[np.float64]
    n_in: NDArray[np.int64]
    n_out: NDArray[np.int64]
    n_ids: NDArray[np.int64]
    ids: NDArray[np.uint64]  # of all rows, one after the other


def _columns(rows: list[Any]) -> _Columns:
    """Raises OverflowError where a number does not fit, also for an id below 0."""
    times, n_in, n_out, lists = zip(*map(_FIELDS, rows), strict=True)
    ids = array("Q")  # reads a list in a third of the time that NumPy takes
    for row in lists:
        ids.fromlist(row)
    return _Columns(
        np.array(times, np.float64),
        np.array(n_in, np.int64),
        np.array(n_out, np.int64),
        np.fromiter(map(len, lists), np.int64, len(lists)),
        np.frombuffer(ids, np.uint64) if ids else np.zeros(0, np.uint64),
    )


def _all_good(block_tokens: int, rows: list[Any]) -> _Columns | None:
    """The columns, where ``why_bad`` would have nothing to say about any row."""
    if not rows:
        return None
    try:
        found = _columns(rows)
    except OverflowError:
        return None
    n_in, n_out, n_ids = found.n_in, found.n_out, found.n_ids
    full = n_in // block_tokens
    good = (n_in >= 1) & (n_in <= MAX_TOKENS) & (n_out >= 0) & (n_out <= MAX_TOKENS)
    good &= (n_ids == full) | (n_ids == -(-n_in // block_tokens))
    good &= np.abs(found.times) < _MAX_TIME
    return found if bool(good.all()) else None


def _requests(
    found: _Columns, unit_s: float, block_tokens: int, sessions: list[str | None]
) -> list[Request]:
    times, n_in, n_out = (found.times * unit_s).tolist(), found.n_in.tolist(), found.n_out.tolist()
    ends = np.cumsum(UNIT * found.n_ids)
    flat = found.ids.view(np.uint32)
    bounds = zip((ends - UNIT * found.n_ids).tolist(), ends.tolist(), strict=True)
    units = [flat[begin:end] for begin, end in bounds]
    for i in np.flatnonzero(found.n_ids * block_tokens < found.n_in).tolist():
        # A partial block without a name gets one that nothing else has, but by accident.
        name = hash((times[i], n_in[i], n_out[i], i)) & (2**63 - 1)
        units[i] = np.concatenate([units[i], np.array([name], np.uint64).view(np.uint32)])
    fields = zip(times, units, n_in, n_out, sessions, repeat(1), strict=False)
    return [_new(Request, row) for row in fields]  # Request(*row) takes three times as long
