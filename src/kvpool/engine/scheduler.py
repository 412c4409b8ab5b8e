"""Which tokens the next pass computes: the whole policy of the engine, on one page.

    add --> waiting --admit--> running --finish--> (blocks back)
               ^                  |
               +----- preempt ----+        blocks back; computed again later

A *request* is admitted when blocks for all it has to compute are there: its trunk, the tokens that
all its samples share. The trunk is computed in chunks, forked into its samples, and from then on
each of them gets one token a pass. Each pass:

    1. feed      every sample's newest token joins its sequence, all in one call. If blocks run out,
                 the youngest running request is preempted: it gives its blocks back and waits.
    2. decode    one row for each of these samples
    3. prefill   chunks of trunks that are being computed, oldest first   } while the budget of
    4. admit     waiting requests, oldest first                           } tokens lasts
    5. draft     tokens that may come next, for those that speculate      }

Who waits in 4. A request that begins like one whose prompt is being computed right now waits for it
and finds its blocks, instead of computing the same a second time; others may pass. When the oldest
one does not fit, nobody passes it. To fit means that blocks for the trunk are there, and for what
samples need when they part: its own, and those of requests before it. Fewer were left when somebody
was preempted, so nobody comes and goes in turns.

Why it ends. The oldest running request is preempted by none but itself, and ``check_fits`` let
only requests in that fit alone. So the oldest one always comes to its end.

Source: seed section 6 (L10.1, L10.2); Yu et al., Orca (OSDI 2022); Kwon et al. (SOSP 2023), 4.5;
Agrawal et al., Sarathi (2023) for the mixed passes.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator
from typing import NamedTuple

import kvpool
from kvpool import BlockManager, InvalidArgument, PoolFull

from .paged import blocks_needed
from .request import Request, Sample, whole
from .speculative import PromptLookup

__all__ = ["Scheduler", "Work"]

_BY_ARRIVAL = operator.attrgetter("number")


class Work(NamedTuple):
    """Tokens of one sequence to compute: a chunk of a trunk (``sample`` is None), or of a sample.

    ``n_drafts`` of the tokens, the last ones, are guesses.
    """

    request: Request
    sample: Sample | None
    sequence: kvpool.Sequence
    tokens: list[int]
    n_drafts: int = 0


class Scheduler:
    """Holds the queue and the running requests of one manager.

    Args:
        manager: whose blocks are given out; its watermark stays free when a request is admitted.
        max_seqs: sequences that run at the same time.
        max_step_tokens: rows of a pass, so also the largest chunk of a prompt.
        n_drafts: tokens a sample may guess ahead; 0 for none.

    Raises:
        InvalidArgument: max_seqs is not in 1..max_step_tokens, or n_drafts is negative.
        ArgumentTypeError: one of them is no integer.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_seqs: int = 64,
        max_step_tokens: int = 256,
        n_drafts: int = 0,
    ) -> None:
        max_seqs = whole("max_seqs", max_seqs)
        max_step_tokens = whole("max_step_tokens", max_step_tokens)
        n_drafts = whole("n_drafts", n_drafts, 0)
        if not 1 <= max_seqs <= max_step_tokens:
            raise InvalidArgument(
                f"max_seqs is {max_seqs}: not in 1..max_step_tokens ({max_step_tokens}), since "
                "every running sequence gets a token in each pass"
            )
        self.manager, self.max_seqs = manager, max_seqs
        self.max_step_tokens, self.n_drafts = max_step_tokens, n_drafts
        self.waiting: list[Request] = []  # both in the order of arrival
        self.running: list[Request] = []
        self.n_added = 0

    def check_fits(self, request: Request) -> None:
        """Refuses what could never run.

        Raises:
            PoolFull: alone in the pool it could need more blocks than there are.
            InvalidArgument: it has more samples than may run at the same time.
        """
        pool, watermark = self.manager.pool, self.manager.watermark
        n_prompt, n = len(request.prompt), request.width
        needed = blocks_needed(n_prompt, request.max_tokens, n, pool.block_tokens)
        if needed + watermark > pool.n_blocks:
            samples = "1 sample" if n == 1 else f"{n} samples"
            kept = f", of which {watermark} are kept free" if watermark else ""
            raise PoolFull(
                f"the prompt can need {needed} blocks of {pool.block_tokens} tokens ({n_prompt} "
                f"prompt tokens, then {samples} of up to {request.max_tokens}), the pool has "
                f"{pool.n_blocks}{kept}"
            )
        if n > self.max_seqs:
            raise InvalidArgument(f"{n} samples of one prompt, but max_seqs is {self.max_seqs}")

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue. Raises as ``check_fits``."""
        self.check_fits(request)
        request.number = self.n_added
        self.n_added += 1
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and its blocks back."""
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)
        request.free()

    # ---- one pass --------------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """What the next pass computes. Empty: nothing is left to do, or ``stuck`` is set."""
        self.preempted: list[Request] = []
        self.admitted: list[Request] = []
        self.stuck: tuple[Request, PoolFull] | None = None
        self._feed()
        open_work = [work for request in self.running for work in _uncomputed(request)]
        open_work.sort(key=lambda work: len(work.tokens) > 1)  # stable: decode first, oldest first
        budget, plan = self.max_step_tokens, []
        for work in open_work:
            plan.append(work._replace(tokens=work.tokens[:budget]))
            budget -= len(plan[-1].tokens)
            if not budget:
                return plan
        budget = self._admit(plan, budget)
        if self.n_drafts:
            self._draft(plan, budget)
        return plan

    def _feed(self) -> None:
        """Appends the tokens that sequences are behind; preempts until they fit."""
        while True:
            one, many = [], []
            for request in self.running:
                for sample in request.live:
                    if sample.sequence is not None:
                        n = len(request.prompt) + len(sample.tokens) - len(sample.sequence)
                        if n == 1:
                            one.append(sample)
                        elif n > 1:  # it was preempted, and its trunk is shorter than itself
                            many.append((sample.sequence, sample.tokens[-n:]))
            try:
                self.manager.append([s.sequence for s in one], [s.tokens[-1] for s in one])  # type: ignore[misc]
                for sequence, tokens in many:
                    sequence.append(tokens)
                return
            except PoolFull:
                self._make_room()

    def _make_room(self) -> bool:
        """Takes blocks from the one who can wait longest. False: there is nobody."""
        for request in reversed(self.waiting):
            if request.handed is not None:  # it came with blocks; they can be computed
                request.free()
                return True
        if not self.running:
            return False
        request = self.running.pop()
        request.free()
        request.n_preempted += 1
        bisect.insort(self.waiting, request, key=_BY_ARRIVAL)
        self.preempted.append(request)
        return True

    def _admit(self, plan: list[Work], budget: int) -> int:
        """Starts waiting requests; gives the budget that is left."""
        n_running = sum(request.width for request in self.running)
        for request in self.waiting.copy():
            if not budget or n_running + request.width > self.max_seqs:
                break
            if self._will_find_more(request):
                continue
            try:
                request.trunk = self._open(request)
            except PoolFull as error:
                if self.running:
                    break
                if self._make_room():  # no running ones: a later one had come with blocks
                    return self._admit(plan, budget)
                self.stuck = request, error  # others hold the pool's blocks
                break
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=_BY_ARRIVAL)
            self.admitted.append(request)
            n_running += request.width
            for work in _uncomputed(request):
                plan.append(work._replace(tokens=work.tokens[:budget]))
                budget -= len(plan[-1].tokens)
        return budget

    def _open(self, request: Request) -> kvpool.Sequence:
        """Its trunk, with blocks for all of it. PoolFull has changed nothing."""
        tokens, pool = request.common_tokens(), self.manager.pool
        if request.handed is not None:
            trunk = request.handed
            trunk.truncate(min(trunk.n_computed, len(tokens) - 1))  # the last one gives the logits
            trunk.append(tokens[len(trunk) :])
            request.handed = None
            return trunk
        owed = self.manager.watermark + _blocks_ahead(request, len(tokens), pool.block_tokens)
        for other in self.running:
            if other.trunk is not None:
                owed += _blocks_ahead(other, len(other.trunk), pool.block_tokens)
        if self.running and not request.n_preempted:
            owed += self.manager.can_allocate(tokens).n_new
            if owed > _n_available(pool):
                raise PoolFull(f"{owed} blocks needed, {_n_available(pool)} are free or cached")
            return self.manager.allocate(tokens)
        trunk = self.manager.allocate(tokens, resumed=request.n_preempted > 0)
        if request.n_preempted and owed > _n_available(pool):
            message = f"{owed} blocks needed behind the first, {_n_available(pool)} are left"
            trunk.free()
            raise PoolFull(message)
        return trunk

    def _will_find_more(self, request: Request) -> bool:
        """Whether a prompt being computed will leave blocks that this one can use."""
        if self.manager.prefix_cache == "none" or request.handed is not None:
            return False
        size, n_cached = self.manager.pool.block_tokens, -1
        for other in self.running:
            if other.trunk is None:
                continue
            n = _n_common(request.prompt, other.prompt) // size * size
            n = min(n, (len(request.prompt) - 1) // size * size)
            if n > other.trunk.n_computed:
                if n_cached < 0:
                    n_cached = self.manager.can_allocate(request.prompt).n_cached
                if n > n_cached:
                    return True
        return False

    def _draft(self, plan: list[Work], budget: int) -> None:
        """Guesses tokens for samples that decode, as far as budget and blocks allow."""
        for i, (request, sample, sequence, tokens, _) in enumerate(plan):
            if sample is None or request.beams or len(tokens) > 1:
                continue
            if sample.lookup is None:
                sample.lookup = PromptLookup(request.prompt)
            lookup = sample.lookup
            lookup.extend(sample.tokens[len(lookup) - len(request.prompt) :])
            n = min(self.n_drafts, budget, request.max_tokens - len(sample.tokens) - 1)
            drafts = lookup.propose(n) if n > 0 else []
            if drafts:
                try:
                    sequence.append(drafts)
                except PoolFull:
                    return
                budget -= len(drafts)
                plan[i] = Work(request, sample, sequence, tokens + drafts, len(drafts))


def _uncomputed(request: Request) -> Iterator[Work]:
    """The sequences of a running request that have tokens to compute, and these tokens."""
    if request.trunk is not None:
        tokens = request.common_tokens()[request.trunk.n_computed : len(request.trunk)]
        yield Work(request, None, request.trunk, tokens)
        return
    for sample in request.live:
        sequence = sample.sequence
        if sequence is not None and sequence.n_computed < len(sequence):
            n = len(sequence) - sequence.n_computed
            known = sample.tokens if n <= len(sample.tokens) else request.prompt + sample.tokens
            yield Work(request, sample, sequence, known[-n:])


def _blocks_ahead(request: Request, n_trunk: int, size: int) -> int:
    """Blocks that its samples need behind a trunk of n tokens, apart from the trunk's own."""
    lengths = [len(request.prompt) + len(sample.tokens) for sample in request.live]
    n = sum(-(-length // size) - n_trunk // size for length in lengths)
    return n - (n_trunk % size > 0)  # one of them has the trunk's last block


def _n_available(pool: kvpool.Pool) -> int:
    stats = pool.stats
    return stats.free + stats.cached


def _n_common(a: list[int], b: list[int]) -> int:
    """How many tokens two prompts begin with alike."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
