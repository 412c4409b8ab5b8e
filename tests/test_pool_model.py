"""Pool against a plain Python model: Hypothesis drives both and compares everything that can be
seen. The pools are tiny, so that they run full, evict and share all the time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvpool

B = 2  # block_tokens
SHAPE = {"block_tokens": B, "n_layers": 1, "n_kv_heads": 1, "head_dim": 1}
HASHES = st.integers(1, 6)  # few, so that they meet


class Full(Exception):
    pass


class Refused(Exception):
    pass


@dataclass
class Block:
    refs: int = 0
    fill: int = 0
    hash: int = 0
    values: list[float] = field(default_factory=lambda: [0.0] * (2 * B))


class Model:
    """The rules of seed section 2, in the simplest data structures that say them."""

    def __init__(self, n: int) -> None:
        self.blocks = [Block() for _ in range(n)]
        self.free = list(range(n - 1, -1, -1))  # last freed, first taken
        self.cached: list[int] = []  # oldest first
        self.evictions = 0

    def require(self, *conditions: bool) -> None:
        if not all(conditions):
            raise Refused

    def held(self, i: int) -> Block:
        self.require(i < len(self.blocks))
        self.require(self.blocks[i].refs > 0)
        return self.blocks[i]

    def find(self, h: int) -> int | None:
        return next((i for i, b in enumerate(self.blocks) if h and b.hash == h), None)

    def alloc(self, n: int) -> list[int]:
        if n > len(self.free) + len(self.cached):
            raise Full
        taken = []
        for _ in range(n):
            if self.free:
                i = self.free.pop()
            else:
                i = self.cached.pop(0)
                self.blocks[i].hash = 0
                self.evictions += 1
            self.blocks[i].refs, self.blocks[i].fill = 1, 0
            taken.append(i)
        return taken

    def ref(self, ids: list[int]) -> None:
        for i in ids:
            self.held(i)
        for i in ids:
            self.blocks[i].refs += 1

    def unref(self, ids: list[int]) -> None:
        for i in ids:
            self.require(self.held(i).refs >= ids.count(i))
        for i in ids:
            self.blocks[i].refs -= 1
            if self.blocks[i].refs == 0:
                (self.cached if self.blocks[i].hash else self.free).append(i)

    def cow(self, ids: list[int]) -> list[int]:
        needed = 0
        for i in set(ids):
            needed += min(ids.count(i), self.held(i).refs - 1)
        if needed > len(self.free) + len(self.cached):
            raise Full
        out = []
        for i in ids:
            if self.blocks[i].refs > 1:
                (copy,) = self.alloc(1)
                self.blocks[copy].fill = self.blocks[i].fill
                self.blocks[copy].values = list(self.blocks[i].values)
                self.blocks[i].refs -= 1
                out.append(copy)
            else:
                out.append(i)
        return out

    def set_fill(self, ids: list[int], fills: list[int]) -> None:
        for i, fill in zip(ids, fills, strict=True):
            self.require(self.held(i).hash == 0, fill <= B)
        for i, fill in zip(ids, fills, strict=True):
            self.blocks[i].fill = fill

    def register(self, ids: list[int], hashes: list[int]) -> list[bool]:
        before = [b.hash for b in self.blocks]
        answers = []
        try:
            for i, h in zip(ids, hashes, strict=True):
                self.require(self.held(i).fill == B, h != 0, self.blocks[i].hash in (0, h))
                holder = self.find(h)
                if holder is None:
                    self.blocks[i].hash = h
                answers.append(holder in (None, i))
        except Refused:
            for b, h in zip(self.blocks, before, strict=True):
                b.hash = h
            raise
        return answers

    def lookup(self, hashes: list[int]) -> list[int]:
        found = []
        for h in hashes:
            i = self.find(h)
            if i is not None:
                if self.blocks[i].refs == 0:
                    self.cached.remove(i)
                self.blocks[i].refs += 1
            found.append(-1 if i is None else i)
        return found

    def export(self, ids: list[int]) -> list[tuple[int, int, list[float]]]:
        out = []
        for i in ids:
            b = self.held(i)
            self.require(b.fill > 0)
            kept = [x if j % B < b.fill else 0.0 for j, x in enumerate(b.values)]
            out.append((b.hash, b.fill, kept))
        return out

    def import_(self, envelope: list[tuple[int, int, list[float]]]) -> list[int]:
        ids = self.alloc(len(envelope))
        for i, (h, fill, values) in zip(ids, envelope, strict=True):
            self.blocks[i].fill, self.blocks[i].values = fill, list(values)
            if h and self.find(h) is None:
                self.blocks[i].hash = h
        return ids


class PoolMachine(RuleBasedStateMachine):
    @initialize(n=st.sampled_from([5, 6, 4, 3, 2, 1]))
    def create(self, n: int) -> None:
        self.pool = kvpool.Pool(n, **SHAPE)
        self.model = Model(n)
        self.next_value = 1.0
        self.envelopes: list[tuple[bytes, list[tuple[int, int, list[float]]]]] = []

    def both(self, name: str, *args: object, scalar: bool = False) -> object:
        """The same call on both, which must agree on the result or the refusal."""
        try:
            expected = getattr(self.model, name)(*[list(a) for a in args])  # type: ignore[call-overload]
        except Full:
            with pytest.raises(kvpool.PoolFull):
                getattr(self.pool, name)(*args)
            return None
        except Refused:
            with pytest.raises(kvpool.InvalidArgument):
                getattr(self.pool, name)(*args)
            return None
        if scalar:
            result = getattr(self.pool, name)(*[a[0] for a in args])  # type: ignore[index]
            result = None if result is None and name != "lookup" else [result]
            if name == "lookup":
                expected = [None if i < 0 else i for i in expected]
        else:
            result = getattr(self.pool, name)(*args)
            result = None if result is None else result.tolist()
        assert result == expected, name
        return expected

    ids = st.lists(st.integers(0, 6), max_size=5)

    @rule(n=st.integers(0, 7))
    def alloc(self, n: int) -> None:
        try:
            expected = self.model.alloc(n)
        except Full:
            with pytest.raises(kvpool.PoolFull, match=f"{n} blocks needed"):
                self.pool.alloc(n)
            return
        assert self.pool.alloc(n).tolist() == expected
        self.write_new_values(expected)

    @rule()
    def alloc_one(self) -> None:
        try:
            (expected,) = self.model.alloc(1)
        except Full:
            with pytest.raises(kvpool.PoolFull):
                self.pool.alloc()
            return
        assert self.pool.alloc() == expected
        self.write_new_values([expected])

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=4, unique=True))
    def serve_several(self, hashes: list[int]) -> None:
        for h in hashes:
            self.serve(h)

    def serve(self, h: int) -> None:
        """A whole short request: afterwards its block is cached, or free if h is held already."""
        try:
            (block,) = self.model.alloc(1)
        except Full:
            return
        assert self.pool.alloc() == block
        self.write_new_values([block])
        self.both("set_fill", [block], [B], scalar=True)
        self.both("register", [block], [h], scalar=True)
        self.both("unref", [block], scalar=True)

    @rule(i=st.integers(0, 5))
    def finish(self, i: int) -> None:
        """Every holder lets go of a block."""
        if i < len(self.model.blocks):
            self.both("unref", [i] * self.model.blocks[i].refs)

    @precondition(lambda self: any(b.refs for b in self.model.blocks))
    @rule(data=st.data(), name=st.sampled_from(["ref", "unref", "cow"]))
    def rows_of_held_blocks(self, data: st.DataObject, name: str) -> None:
        held = [i for i, b in enumerate(self.model.blocks) if b.refs]
        self.both(name, data.draw(st.lists(st.sampled_from(held), max_size=4)))

    @rule(ids=ids, name=st.sampled_from(["ref", "unref", "cow"]))
    def rows(self, ids: list[int], name: str) -> None:
        self.both(name, ids)

    @rule(i=st.integers(0, 6), name=st.sampled_from(["ref", "unref", "unref", "cow"]))
    def scalars(self, i: int, name: str) -> None:
        self.both(name, [i], scalar=True)

    @rule(ids=ids, data=st.data())
    def set_fill(self, ids: list[int], data: st.DataObject) -> None:
        self.both("set_fill", ids, data.draw(st.lists(
            st.sampled_from([B, B, B, 1, 0, B + 1]), min_size=len(ids), max_size=len(ids)
        )))  # fmt: skip

    @rule(ids=ids, data=st.data())
    def register(self, ids: list[int], data: st.DataObject) -> None:
        n = len(ids)
        self.both("register", ids, data.draw(st.lists(HASHES, min_size=n, max_size=n)))

    @rule(i=st.integers(0, 6), h=HASHES)
    def fill_and_register(self, i: int, h: int) -> None:
        self.both("set_fill", [i], [B], scalar=True)
        self.both("register", [i], [h], scalar=True)

    @rule(hashes=st.lists(st.integers(0, 6), max_size=5))
    def lookup(self, hashes: list[int]) -> None:
        self.both("lookup", np.array(hashes, np.uint64))

    @rule(h=st.integers(0, 6))
    def lookup_one(self, h: int) -> None:
        self.both("lookup", [h], scalar=True)

    def write_new_values(self, ids: list[int]) -> None:
        """A new block's contents are undefined until somebody writes them."""
        for i in ids:
            values = [self.next_value + k for k in range(2 * B)]
            self.next_value = (self.next_value + 2 * B) % 2000
            self.model.blocks[i].values = values
            self.pool.block(i)[:] = np.reshape(values, self.pool.block(i).shape)

    @rule(i=st.integers(0, 5))
    def write(self, i: int) -> None:
        if i < len(self.model.blocks):
            b = self.model.blocks[i]
            if b.refs == 1 and not b.hash:
                self.write_new_values([i])

    @rule(ids=ids)
    def export(self, ids: list[int]) -> None:
        try:
            expected = self.model.export(ids)
        except Refused:
            with pytest.raises(kvpool.InvalidArgument):
                self.pool.export(ids)
            return
        envelope = self.pool.export(ids)
        self.envelopes = [*self.envelopes[-4:], (envelope, expected)]
        record = 12 + self.pool.block_bytes
        for k, (h, fill, values) in enumerate(expected):
            part = envelope[28 + k * record : 28 + (k + 1) * record]
            assert int.from_bytes(part[:8], "little") == h
            assert int.from_bytes(part[8:12], "little") == fill
            assert np.frombuffer(part[12:], np.float16).tolist() == values

    @precondition(lambda self: self.envelopes)
    @rule(data=st.data())
    def import_(self, data: st.DataObject) -> None:
        envelope, content = data.draw(st.sampled_from(self.envelopes))
        try:
            expected = self.model.import_(content)
        except Full:
            with pytest.raises(kvpool.PoolFull):
                self.pool.import_(envelope)
            return
        assert self.pool.import_(envelope).tolist() == expected

    @precondition(lambda self: self.envelopes)
    @rule(data=st.data(), bit=st.integers(0, 10**6))
    def import_of_damaged_bytes(self, data: st.DataObject, bit: int) -> None:
        envelope = bytearray(data.draw(st.sampled_from(self.envelopes))[0])
        bit %= 8 * len(envelope)
        envelope[bit // 8] ^= 1 << bit % 8
        with pytest.raises(kvpool.CorruptEnvelope):
            self.pool.import_(envelope)

    @invariant()
    def everything_agrees(self) -> None:
        self.pool.check()
        model, pool = self.model, self.pool
        used = sum(b.refs > 0 for b in model.blocks)
        assert pool.stats == (len(model.free), used, len(model.cached), model.evictions)
        everything = range(pool.n_blocks)
        assert pool.refs(everything).tolist() == [b.refs for b in model.blocks]
        assert pool.hash(everything).tolist() == [b.hash for b in model.blocks]
        for i, b in enumerate(model.blocks):
            if b.refs or b.hash:
                assert pool.fill(i) == b.fill
                assert pool.block(i).ravel().tolist() == b.values


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestPoolAgainstModel = PoolMachine.TestCase
