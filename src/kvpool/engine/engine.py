"""The engine: passes of the model over whatever the scheduler says, and tokens out of them.

    with Engine(model, manager) as engine:
        requests = [engine.add(Request(prompt)) for prompt in prompts]
        engine.run()
        for request in requests: request.samples[0].tokens

    one step    scheduler.schedule()     which tokens of which sequences
                BatchMaker.make()        as arrays: rows, slots, block tables
                model.forward()          K and V into the blocks, attention out of them
                manager.commit()         full blocks become findable
                model.logits()           of the rows that end a sequence
                pick                     a token for each sample; stop, length, callbacks; forks

What a request gets does not depend on the others, on chunks, preemption, the prefix cache, the
blocks or the drafts: every row has the same bits in any pass (llama.py), and every sample its own
random numbers (sampling.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from kvpool import BlockManager, InvalidArgument

from . import beam
from .llama import Array, Llama
from .paged import BatchMaker, Span
from .request import Request, Sample
from .scheduler import Scheduler, Work

__all__ = ["Engine", "Step"]


class Step(NamedTuple):
    """What one pass did.

    Attributes:
        seconds: it took.
        n_decode, n_prefill: rows of running samples (drafts among them) and of prompts.
        n_drafted, n_accepted: tokens that were guessed, and those that were right.
        n_tokens: tokens generated.
        admitted, preempted, finished: the requests that started, gave their blocks back, ended.
    """

    seconds: float = 0.0
    n_decode: int = 0
    n_prefill: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_tokens: int = 0
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()
    finished: tuple[Request, ...] = ()


class Engine:
    """Answers many requests at once, with K and V in the blocks of one manager.

    Args:
        model: computes.
        manager: of a pool with the model's dimensions. Whoever made it closes it.
        max_seqs: sequences that run at the same time.
        max_step_tokens: rows of a pass, so also the largest chunk of a prompt.
        n_drafts: tokens a sample may guess ahead (prompt lookup); 0 for none.

    Closing it, also by an exception, aborts all requests: no block stays in use. Not for several
    threads at the same time.

    Raises:
        InvalidArgument: the pool has other dimensions than the model; a number is out of range.
    """

    def __init__(
        self,
        model: Llama,
        manager: BlockManager,
        *,
        max_seqs: int = 64,
        max_step_tokens: int = 256,
        n_drafts: int = 0,
    ) -> None:
        pool, cfg = manager.pool, model.config
        for name in ("n_layers", "n_kv_heads", "head_dim"):
            if getattr(pool, name) != getattr(cfg, name):
                raise InvalidArgument(
                    f"{name}: the pool has {getattr(pool, name)}, the model {getattr(cfg, name)}"
                )
        self.model, self.manager = model, manager
        self.scheduler = Scheduler(
            manager, max_seqs=max_seqs, max_step_tokens=max_step_tokens, n_drafts=n_drafts
        )
        self._maker = BatchMaker(manager)
        self._ended: list[Request] = []  # by this step, as the number below
        self._n_generated = 0
        self._is_stepping = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    # ---- requests --------------------------------------------------------------------------------

    def add(self, request: Request) -> Request:
        """Puts a request into the queue, and gives it back.

        Raises:
            PoolFull: it could need more blocks than the pool has; the text has the numbers.
            InvalidArgument: it is longer than the model's context, a token is none of the model's,
                it was added before, or its ``sequence`` is another manager's or another request's.

            A sequence that the request took over is freed then, unless another request has it.
        """
        cfg, n = self.model.config, len(request.prompt)
        try:
            if request.number >= 0:
                raise InvalidArgument("the request was added before")
            self._check_handed(request)
            if n + request.max_tokens > cfg.context_length:
                raise InvalidArgument(
                    f"the prompt has {n} tokens, and with max_tokens {request.max_tokens} is "
                    f"longer than the model's context of {cfg.context_length}"
                )
            tokens = request.prompt + request.samples[0].tokens
            if not 0 <= min(tokens) <= max(tokens) < cfg.vocab_size:
                wrong = next(token for token in tokens if not 0 <= token < cfg.vocab_size)
                raise InvalidArgument(f"prompt: token {wrong} is not in 0..{cfg.vocab_size - 1}")
            self.scheduler.add(request)
        except Exception:
            if request.number < 0:
                request.free()
            raise
        request.added_s = time.perf_counter()
        return request

    def _check_handed(self, request: Request) -> None:
        handed = request.handed
        if handed is None:
            return
        for other in [*self.scheduler.running, *self.scheduler.waiting]:
            if any(handed is sequence for sequence in other.sequences()):
                request.handed = None  # it is not this request's to free
                raise InvalidArgument("sequence: another request has it")
        self.manager.seq_lens([handed])  # InvalidArgument: freed, or another manager's

    def abort(self, request: Request) -> None:
        """Ends a request now; what was generated stays. One that is done is left alone.

        Raises:
            InvalidArgument: the request is in another engine, or in none.
        """
        if request.finished_s:
            return
        if request not in self.scheduler.running and request not in self.scheduler.waiting:
            raise InvalidArgument("request: expected one of this engine, it is in another or none")
        self._end(request, "abort")

    def close(self, error: BaseException | None = None) -> None:
        """Ends all requests: as aborted, or as failed with ``error``. Again does nothing."""
        scheduler, failed = self.scheduler, isinstance(error, Exception)
        for request in [*scheduler.running, *scheduler.waiting]:
            request.error = error
            self._end(request, "error" if failed else "abort")

    def run(
        self,
        check: Callable[[], None] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        """Steps until every request is done.

        ``check()`` is called before every step and may raise, which is the clean way to stop;
        ``on_step`` after it. An exception of either, or of the model, ends all requests.

        Raises:
            InvalidArgument: a callback called it, in the middle of a pass.
        """
        self._check_idle()
        try:
            while self.is_busy:
                if check is not None:
                    check()
                step = self.step()
                if on_step is not None:
                    on_step(step)
        except BaseException as error:
            self.close(error)
            raise

    # ---- one step --------------------------------------------------------------------------------

    def step(self) -> Step:
        """One pass. An exception of the model ends all requests; one of a callback, its request.

        Raises:
            InvalidArgument: a callback called it, in the middle of a pass.
        """
        self._check_idle()
        self._is_stepping = True
        try:
            return self._step()
        except BaseException as error:
            self.close(error)
            raise
        finally:
            self._is_stepping = False

    def _check_idle(self) -> None:
        if self._is_stepping:
            raise InvalidArgument("a pass is under way: on_token cannot begin another")

    def _step(self) -> Step:
        started = time.perf_counter()
        scheduler, self._ended, self._n_generated = self.scheduler, [], 0
        plan = scheduler.schedule()
        for request in scheduler.admitted:
            if not request.n_preempted:
                request.started_s = started
                request.n_cached = request.trunk.n_cached if request.trunk is not None else 0
        if scheduler.stuck is not None:
            request, full = scheduler.stuck
            request.error = full
            self._end(request, "error")
        n_accepted = self._compute(plan) if plan else 0
        prefill = sum(len(work.tokens) for work in plan if work.sample is None)
        return Step(
            seconds=time.perf_counter() - started,
            n_decode=sum(len(work.tokens) for work in plan) - prefill,
            n_prefill=prefill,
            n_drafted=sum(work.n_drafts for work in plan),
            n_accepted=n_accepted,
            n_tokens=self._n_generated,
            admitted=tuple(scheduler.admitted),
            preempted=tuple(scheduler.preempted),
            finished=tuple(self._ended),
        )

    def _compute(self, plan: list[Work]) -> int:
        """Forward, commit, logits, tokens. Gives the number of drafts that were right."""
        self._note_peaks()
        spans = [Span(work.sequence, work.tokens) for work in plan]
        batch, places = self._maker.make(spans)
        hidden = self.model.forward(batch)
        certain = [work for work in plan if not work.n_drafts]
        self.manager.commit(
            [work.sequence for work in certain],
            [work.sequence.n_computed + len(work.tokens) for work in certain],
        )
        wanted: list[int] = []  # rows whose next token is asked for
        ends: list[tuple[Work, int]] = []
        for work, (_, last) in zip(plan, places, strict=True):
            if work.n_drafts or work.sequence.n_computed == len(work.sequence):
                wanted += range(last - 1 - work.n_drafts, last)
                ends.append((work, 1 + work.n_drafts))
        if not wanted:
            return 0
        logits, first, n_accepted = self.model.logits(hidden[wanted]), 0, 0
        for work, n in ends:
            rows, first = logits[first : first + n], first + n
            if work.request.is_done:
                continue  # a callback of this pass ended it
            if work.sample is None:
                self._fork_trunk(work.request, rows[0])
            elif work.request.beams:
                self._note_candidates(work.request, work.sample, rows[0])
            else:
                n_accepted += self._pick(work, work.sample, rows)
        return n_accepted

    def _fork_trunk(self, request: Request, row: Array) -> None:
        """The trunk is computed: every sample gets a fork, the last one the trunk itself."""
        trunk, samples = request.trunk, request.live
        assert trunk is not None
        n_computed = len(trunk)
        for sample in samples[:-1]:
            sample.sequence = trunk.fork()
        samples[-1].sequence, request.trunk = trunk, None
        for sample in samples:
            if len(request.prompt) + len(sample.tokens) > n_computed:
                continue  # preempted while it was ahead of the others: feed and compute it first
            if request.beams:
                self._note_candidates(request, sample, row)
            elif not request.is_done:  # the callback of an earlier sample may have ended it
                self._take(request, sample, sample.sampler.pick(row))  # type: ignore[union-attr]

    def _pick(self, work: Work, sample: Sample, rows: Array) -> int:
        """Tokens of one sample from the rows of its last token and its drafts; the drafts are right
        as far as the model picks them. Gives how many were."""
        sequence, drafts = work.sequence, work.tokens[len(work.tokens) - work.n_drafts :]
        tokens: list[int] = []
        for i, row in enumerate(rows):
            tokens.append(sample.sampler.pick(row))  # type: ignore[union-attr]
            if i == len(drafts) or tokens[-1] != drafts[i]:
                break
        n_right = len(tokens) - 1
        if drafts:
            sequence.truncate(len(sequence) - len(drafts) + n_right)
            sequence.commit()
        for token in tokens:
            self._take(work.request, sample, token)
            if sample.finish:
                break
        return n_right

    def _take(self, request: Request, sample: Sample, token: int) -> None:
        """One more token of a sample."""
        if not request.first_token_s:
            request.first_token_s = time.perf_counter()
        if token in request.stop_tokens:
            sample.finish = "stop"
        else:
            sample.tokens.append(token)
            self._n_generated += 1
            if len(sample.tokens) == request.max_tokens:
                sample.finish = "length"
            self._tell(request, request.samples.index(sample), token)
        if sample.finish and sample.sequence is not None:
            sample.sequence.free()
            sample.sequence = None
        if request.is_done:
            self._end(request, "")

    def _note_candidates(self, request: Request, sample: Sample, row: Array) -> None:
        """The logits of one beam are there; with those of the last one the search goes on."""
        if not request.first_token_s:
            request.first_token_s = time.perf_counter()
        n = request.beams + len(request.stop_tokens)
        sample.candidates = beam.candidates(sample.score, row, n)
        if all(other.candidates for other in request.live):
            beam.advance(request)
            self._n_generated += len(request.samples)
            if request.is_done:
                for i, answer in enumerate(request.samples):
                    for token in answer.tokens:
                        self._tell(request, i, token)
                self._end(request, "")

    def _tell(self, request: Request, index: int, token: int) -> None:
        """The callback. What it raises ends its request, unless it ends the program."""
        if request.on_token is None or request.finished_s:  # an earlier call may have ended it
            return
        try:
            request.on_token(index, token)
        except Exception as error:
            request.error = error
            self._end(request, "error")

    def _end(self, request: Request, finish: str) -> None:
        """Takes a request out; its unfinished samples get ``finish``."""
        if request.finished_s:
            return
        request.finished_s = time.perf_counter()
        self.scheduler.remove(request)
        for sample in request.live:
            sample.finish = finish
        self._ended.append(request)

    def _note_peaks(self) -> None:
        for request in self.scheduler.running:
            held = request.sequences()
            if len(held) == 1:
                n = held[0].n_blocks
            else:
                n = len({int(block) for sequence in held for block in sequence.blocks})
            request.peak_blocks = max(request.peak_blocks, n)
