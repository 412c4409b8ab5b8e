"""Workloads from a seed: chats, agents with tools, shared system prompts, few-shot batches.

The distributions are chosen, not measured; each is named in :data:`WORKLOADS` and printed by
``kvpool trace synth``. Where there are figures of real traffic they are near them: answers of a few
hundred tokens, prompts with a long tail (Mooncake's conversations: 12,035 tokens in the mean, 343
answered), popular prompts by a Zipf law.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError
from .request import Request, make_request, n_blocks_of

__all__ = ["WORKLOADS", "Workload", "synthesize", "to_rows"]


class Workload(NamedTuple):
    """What a workload is made of."""

    about: str
    rate: float  # new sessions a second
    system_prompts: int  # how many there are, popular by a Zipf law of exponent 1.2
    system_tokens: tuple[int, int]  # from, to
    turns: float  # mean, geometric
    user_tokens: tuple[float, float]  # lognormal: median, sigma
    answer_tokens: tuple[float, float]  # lognormal: median, sigma
    pause_s: tuple[float, float]  # lognormal: median, sigma, from an answer to the next turn


WORKLOADS = {
    "chat": Workload(
        "conversations of several turns, each with everything said before",
        0.5, 8, (200, 1200), 4.0, (120, 1.2), (220, 0.8), (30, 1.0),
    ),
    "agents": Workload(
        "agents that call tools: many short turns, long results, short pauses",
        0.15, 4, (2000, 6000), 12.0, (600, 1.3), (90, 0.7), (3, 0.8),
    ),
    "shared": Workload(
        "one question each, behind one of many system prompts",
        2.0, 60, (400, 4000), 1.0, (80, 1.0), (150, 0.8), (1, 0.1),
    ),
    "few-shot": Workload(
        "batches of questions behind the same long examples",
        0.05, 12, (3000, 8000), 40.0, (60, 0.8), (20, 0.6), (0.05, 0.5),
    ),
}  # fmt: skip

MIXED = "mixed"  # all of them at once


def synthesize(
    workload: str = MIXED,
    *,
    seed: int = 0,
    requests: int = 5000,
    block_tokens: int = 16,
    batch: int = 1000,
) -> Iterator[list[Request]]:
    """Batches of requests by arrival time: the same for the same arguments, on any machine.

    Raises TraceError for an unknown workload, and a number out of range.

    >>> [first, *_], *_ = synthesize("shared", seed=3, requests=10)
    >>> len(first.ids) == -(-first.input_length // 16), first.session
    (True, 'shared-0')
    """
    if workload != MIXED and workload not in WORKLOADS:
        raise TraceError(f"workload {workload!r}: expected {MIXED}, {', '.join(WORKLOADS)}")
    for name, value, least in (
        ("seed", seed, 0),
        ("requests", requests, 0),
        ("block_tokens", block_tokens, 1),
        ("batch", batch, 1),
    ):
        if value < least:
            raise TraceError(f"{name} is {value}, expected at least {least}")
    names = list(WORKLOADS) if workload == MIXED else [workload]
    streams = [
        _sessions(name, np.random.default_rng([seed, i]), block_tokens, i)
        for i, name in enumerate(names)
    ]
    out: list[Request] = []
    for n, request in enumerate(heapq.merge(*streams, key=lambda r: r.arrival_s)):
        if n == requests:
            break
        out.append(request)
        if len(out) == batch:
            yield out
            out = []
    if out:
        yield out


def _sessions(
    name: str, rng: np.random.Generator, block_tokens: int, number: int
) -> Iterator[Request]:
    """An endless stream of one workload's requests, by arrival time."""
    work = WORKLOADS[name]
    popular = 1.0 / np.arange(1, work.system_prompts + 1) ** 1.2
    popular /= popular.sum()
    lengths = rng.integers(*work.system_tokens, work.system_prompts, endpoint=True)
    due: list[tuple[float, int, _Session]] = []  # the next turn of each open session
    next_session, serial = float(rng.exponential(1 / work.rate)), 0
    while True:
        while not due or next_session < due[0][0]:
            which = int(rng.choice(work.system_prompts, p=popular))
            turns = int(rng.geometric(1 / work.turns))
            session = _Session(f"{name}-{serial}", (number << 40) + which, int(lengths[which]))
            session.turns, session.own = turns, (number << 40) + (1 << 32) + serial
            heapq.heappush(due, (next_session, serial, session))
            next_session += float(rng.exponential(1 / work.rate))
            serial += 1
        at, key, session = heapq.heappop(due)
        request = session.turn(at, work, rng, block_tokens, few_shot=name == "few-shot")
        yield request
        if session.turns > 0:
            pause = float(rng.lognormal(np.log(work.pause_s[0]), work.pause_s[1]))
            answered = 0.0 if name == "few-shot" else request.output_length / 50
            heapq.heappush(due, (at + answered + pause, key, session))


class _Session:
    """What was said so far, as tokens; only its length is kept, and whose tokens they are."""

    def __init__(self, name: str, system: int, system_tokens: int) -> None:
        self.name, self.system, self.system_tokens = name, system, system_tokens
        self.turns, self.own = 1, 0
        self.said = 0  # tokens behind the system prompt
        self.asked = 0

    def turn(
        self,
        at: float,
        work: Workload,
        rng: np.random.Generator,
        block_tokens: int,
        few_shot: bool,
    ) -> Request:
        user = max(1, int(rng.lognormal(np.log(work.user_tokens[0]), work.user_tokens[1])))
        answer = max(1, int(rng.lognormal(np.log(work.answer_tokens[0]), work.answer_tokens[1])))
        before = 0 if few_shot else self.said
        length = self.system_tokens + before + user
        ids = self._ids(length, block_tokens, ends_here=few_shot)
        self.said = before + user + answer
        self.turns -= 1
        self.asked += 1
        return make_request(at, ids, length, answer, session=self.name)

    def _ids(self, length: int, block_tokens: int, ends_here: bool) -> NDArray[np.uint64]:
        """Blocks of the system prompt alone are everybody's, the rest this session's; a partial
        block at the end differs from the same block when it is full."""
        n = n_blocks_of(length, block_tokens)
        shared = self.system_tokens // block_tokens
        ids = np.arange(n, dtype=np.uint64)
        ids[:shared] += np.uint64(_mix(self.system))
        own = _mix(self.own + (self.asked << 50) if ends_here else self.own)
        ids[shared:] += np.uint64(own)
        if length % block_tokens:
            ids[-1] = np.uint64(_mix(own + length))
        return ids


def _mix(x: int) -> int:
    """splitmix64's finisher: far apart for neighbours. The top bit is off: ids count up from it."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ x >> 31) >> 1


def to_rows(batch: list[Request]) -> Iterator[dict[str, object]]:
    """Requests as lines of a Qwen-Bailian trace, with ``session`` besides."""
    for request in batch:
        yield {
            "chat_id": _mix(hash_name(request.session or "")) >> 11,
            "parent_chat_id": -1,
            "timestamp": round(request.arrival_s, 3),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "type": (request.session or "").rpartition("-")[0],
            "turn": 1,
            "hash_ids": request.ids.tolist(),
        }


def hash_name(name: str) -> int:
    """A number for a name, the same in every process."""
    number = 0
    for byte in name.encode():
        number = (number * 257 + byte) & (2**64 - 1)
    return number
