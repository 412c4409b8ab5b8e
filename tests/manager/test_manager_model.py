"""BlockManager against a plain Python model: Hypothesis drives both and compares all that can be
seen. Pools of a few blocks and two token ids, so that everything collides."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manager_model import Block, Full, Model, Seq

import kvpool

TOKEN = st.sampled_from([0, 0, 0, 0, 1])  # mostly equal prefixes
PROMPT = st.lists(TOKEN, min_size=1, max_size=10)
ROOT = st.sampled_from([0, 0, 0, 0, 9])


@cache
def name_of(root: int, prefix: tuple[int, ...], block_tokens: int) -> int:
    return int(kvpool.block_hashes(prefix, block_tokens, root)[-1])


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        n=st.sampled_from([8, 16, 12, 20, 10, 6, 4, 2, 1]),
        block_tokens=st.sampled_from([2, 2, 1, 3]),
        watermark=st.sampled_from([0, 0, 0, 1, 2]),
        caching=st.sampled_from([True] * 7 + [False]),
    )
    def create(self, n: int, block_tokens: int, watermark: int, caching: bool) -> None:
        watermark = min(watermark, n - 1)
        self.pool = kvpool.Pool(n, block_tokens=block_tokens, n_layers=1, n_kv_heads=1, head_dim=1)
        self.mgr = kvpool.BlockManager(
            self.pool,
            prefix_cache="hash" if caching else "none",
            watermark=watermark,
            events=True,
        )
        self.model = Model(n, block_tokens, watermark, caching)
        self.real: dict[int, kvpool.Sequence] = {}  # by id() of the model's
        self.replayed: set[int] = set()
        self.n_events = 0

    def teardown(self) -> None:
        if hasattr(self, "mgr"):
            self.mgr.close()
            self.pool.check()
            assert self.pool.stats.used == 0

    # ---- helpers -------------------------------------------------------------------------------

    def of(self, seq: Seq) -> kvpool.Sequence:
        return self.real[id(seq)]

    def pick(self, data: st.DataObject) -> Seq:
        return self.model.seqs[data.draw(st.integers(0, len(self.model.seqs) - 1))]

    def born(self, seq: Seq, real: kvpool.Sequence) -> None:
        self.real[id(seq)] = real
        self.recognize(seq)

    def recognize(self, seq: Seq) -> None:
        """The same blocks have the same ids, whoever holds them."""
        for block, number in zip(seq.blocks, self.of(seq).blocks.tolist(), strict=True):
            block.id = number if block.id is None else block.id
            assert block.id == number

    def same_copies(
        self, copies: list[tuple[Block, Block]], real: list[tuple[int, int]], *seqs: Seq
    ) -> None:
        for seq in seqs:
            self.recognize(seq)
        assert sorted(real) == sorted((a.id, b.id) for a, b in copies)

    def refused(self, call: Callable[[], object]) -> None:
        """Both said no. An engine then preempts: the oldest sequence goes."""
        with pytest.raises(kvpool.PoolFull, match="blocks needed"):
            call()
        self.everything_agrees()
        if self.model.seqs:
            self.release(self.model.seqs[0])

    def release(self, seq: Seq) -> None:
        self.real.pop(id(seq)).free()
        self.model.release(seq)

    some_seqs = precondition(lambda self: self.model.seqs)

    # ---- requests ------------------------------------------------------------------------------

    @rule(
        tokens=st.lists(TOKEN, max_size=10),
        root=ROOT,
        max_cached=st.sampled_from([None] * 5 + [0, 1, 4]),
        last=st.booleans(),
        resumed=st.booleans(),
    )
    def allocate(
        self, tokens: list[int], root: int, max_cached: int | None, last: bool, resumed: bool
    ) -> None:
        kwargs = {"namespace": root, "max_cached_tokens": max_cached, "match_last": last}
        expected = self.model.can_allocate(tokens, root, max_cached, last)
        assert self.mgr.can_allocate(tokens, **kwargs) == expected
        try:
            seq = self.model.allocate(tokens, root, max_cached, last, resumed)
        except Full:
            self.refused(lambda: self.mgr.allocate(tokens, resumed=resumed, **kwargs))
            return
        self.born(seq, self.mgr.allocate(tokens, resumed=resumed, **kwargs))

    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=4), root=ROOT)
    def requests(self, prompts: list[list[int]], root: int) -> None:
        for tokens in prompts:
            self.request(tokens, root, commit=True)

    @rule(tokens=PROMPT, root=ROOT)
    def aborted(self, tokens: list[int], root: int) -> None:
        self.request(tokens, root, commit=False)

    def request(self, tokens: list[int], root: int, commit: bool) -> None:
        try:
            seq = self.model.allocate(tokens, root, None, False, False)
        except Full:
            self.refused(lambda: self.mgr.allocate(tokens, namespace=root))
            return
        with self.mgr.allocate(tokens, namespace=root) as real:
            self.born(seq, real)
            if commit:
                self.model.commit(seq, len(tokens))
                real.commit()
        del self.real[id(seq)]
        self.model.release(seq)

    @rule(tokens=PROMPT, root=ROOT, copies=st.integers(2, 3))
    def the_same_prompt_at_once(self, tokens: list[int], root: int, copies: int) -> None:
        """None of them finds the others' blocks: all but one stay private when they commit."""
        for _ in range(copies):
            try:
                seq = self.model.allocate(tokens, root, None, False, False)
            except Full:
                self.refused(lambda: self.mgr.allocate(tokens, namespace=root))
                return
            self.born(seq, self.mgr.allocate(tokens, namespace=root))

    @some_seqs
    @rule(data=st.data(), tokens=st.lists(TOKEN, max_size=5))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        seq = self.pick(data)
        argument = tokens[0] if len(tokens) == 1 else tokens
        try:
            copies = self.model.append(seq, tokens)
        except Full:
            self.refused(lambda: self.of(seq).append(argument))
            return
        self.same_copies(copies, self.of(seq).append(argument), seq)

    @some_seqs
    @rule(data=st.data(), children=st.integers(1, 2))
    def beam(self, data: st.DataObject, children: int) -> None:
        """A parent and its children go on together."""
        seqs = [self.pick(data)]
        for _ in range(children if len(self.model.seqs) < 6 else 0):
            seqs.append(self.model.fork(seqs[0]))
            self.born(seqs[-1], self.of(seqs[0]).fork())
        self.step(data, data.draw(st.permutations(seqs)))

    @some_seqs
    @rule(data=st.data())
    def decode_step(self, data: st.DataObject) -> None:
        seqs = data.draw(st.permutations(self.model.seqs))
        self.step(data, seqs[: data.draw(st.integers(1, len(seqs)))])

    def step(self, data: st.DataObject, seqs: list[Seq]) -> None:
        tokens = data.draw(st.lists(TOKEN, min_size=len(seqs), max_size=len(seqs)))
        real = [self.of(s) for s in seqs]
        try:
            copies = self.model.append_batch(seqs, tokens)
        except Full:
            self.refused(lambda: self.mgr.append(real, tokens))
            return
        self.same_copies(copies, self.mgr.append(real, tokens), *seqs)
        table = self.mgr.block_tables(real).tolist()
        assert [[i for i in row if i >= 0] for row in table] == [
            [b.id for b in s.blocks] for s in seqs
        ]

    @some_seqs
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        n = data.draw(st.integers(0, len(seq.tokens)))
        self.model.commit(seq, n)
        self.of(seq).commit(n)

    @some_seqs
    @rule(everything=st.sampled_from([True, True, False]), data=st.data())
    def commit_many(self, everything: bool, data: st.DataObject) -> None:
        seqs = list(self.model.seqs)
        lengths = [
            len(s.tokens) if everything else data.draw(st.integers(0, len(s.tokens))) for s in seqs
        ]
        for seq, n in zip(seqs, lengths, strict=True):
            self.model.commit(seq, n)
        self.mgr.commit([self.of(s) for s in seqs], None if everything else lengths)

    @some_seqs
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if len(self.model.seqs) < 6:
            seq = self.pick(data)
            self.born(self.model.fork(seq), self.of(seq).fork())

    @some_seqs
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        n = data.draw(st.integers(0, len(seq.tokens)))
        self.model.truncate(seq, n)
        self.of(seq).truncate(n)

    @some_seqs
    @rule(data=st.data(), draft=st.lists(TOKEN, min_size=1, max_size=4), kept=st.integers(0, 3))
    def speculate(self, data: st.DataObject, draft: list[int], kept: int) -> None:
        """Draft tokens are computed, most of them are rejected, and others take their place."""
        seq = self.pick(data)
        real = self.of(seq)
        start = len(seq.tokens)
        for tokens in (draft, [data.draw(TOKEN)]):
            try:
                copies = self.model.append(seq, tokens)
            except Full:
                self.refused(partial(real.append, tokens))
                return
            self.same_copies(copies, real.append(tokens), seq)
            self.model.commit(seq, len(seq.tokens))
            real.commit()
            if tokens is draft:
                n = min(start + kept, len(seq.tokens))
                self.model.truncate(seq, n)
                real.truncate(n)

    @some_seqs
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.release(seq)

    @some_seqs
    @rule(data=st.data())
    def free_many(self, data: st.DataObject) -> None:
        seqs = data.draw(st.permutations(self.model.seqs))[:3]
        self.mgr.free([self.real.pop(id(s)) for s in seqs])
        for seq in seqs:
            self.model.release(seq)

    @some_seqs
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.release(seq)
        tokens = list(seq.tokens)
        try:
            again = self.model.allocate(tokens, seq.root, None, False, True)
        except Full:
            self.refused(lambda: self.mgr.allocate(tokens, namespace=seq.root, resumed=True))
            return
        self.born(again, self.mgr.allocate(tokens, namespace=seq.root, resumed=True))

    # ---- the index -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.index) > 1)
    @rule(root=st.sampled_from([None, 0, 9, 77]))
    def reset(self, root: int | None) -> None:
        self.model.reset(root)
        self.mgr.reset(root)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        known = [b for b in {*self.model.index.values(), *self.model.held} if b.id is not None]
        if known:
            blocks = data.draw(st.lists(st.sampled_from(sorted(known, key=lambda b: b.id))))
            self.mgr.evict([b.id for b in blocks])
            for block in blocks:
                self.model.forget(block)

    # ---- what can be seen ----------------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        model, mgr, pool = self.model, self.mgr, self.pool
        mgr.check()
        assert pool.stats == (
            model.free, len(model.held), len(model.cached), model.stats["evictions"]
        )  # fmt: skip
        stats = mgr.stats._asdict()
        assert {k: stats[k] for k in model.stats} == model.stats
        assert stats["n_seqs"] == len(model.seqs)
        assert stats["n_findable"] == len(model.index)
        prompt = model.stats["prompt_tokens"]
        assert stats["hit_rate"] == (model.stats["hit_tokens"] / prompt if prompt else 0.0)
        for seq in model.seqs:
            real = self.of(seq)
            assert real.tokens.tolist() == seq.tokens
            assert (len(real), real.n_cached, real.n_computed, real.n_blocks) == (
                len(seq.tokens), seq.n_cached, seq.n_computed, len(seq.blocks)
            )  # fmt: skip
            self.recognize(seq)
        alive = [*model.held, *model.cached]
        assert len({b.id for b in alive}) == len(alive)
        for block in alive:
            assert pool.refs(block.id) == block.holders
            name = name_of(*block.name, model.B) if block.name else None
            assert pool.hash(block.id) == name

    @invariant()
    def events_rebuild_the_index(self) -> None:
        for event in self.mgr.drain_events():
            assert event.number == self.n_events
            self.n_events += 1
            match event.type:
                case kvpool.EventType.STORED:
                    assert event.hash not in self.replayed
                    assert event.hash == kvpool.block_hash(event.parent, event.tokens)
                    self.replayed.add(event.hash)
                case kvpool.EventType.REMOVED:
                    self.replayed.remove(event.hash)
                case kvpool.EventType.CLEARED:
                    self.replayed.clear()
        B = self.model.B
        assert self.replayed == {name_of(root, prefix, B) for root, _, prefix in self.model.index}
        found = {h for b in self.model.index.values() if (h := self.pool.hash(b.id)) is not None}
        assert found == self.replayed


ManagerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=80, deadline=None)
TestManagerAgainstModel = ManagerMachine.TestCase
