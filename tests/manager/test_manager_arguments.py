"""Wrong use is told, names what it found and where, and changes nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvpool

SHAPE = {"block_tokens": 4, "n_layers": 1, "n_kv_heads": 1, "head_dim": 1}


class World:
    """A manager with two sequences, one that is freed, and one of another manager."""

    def __init__(self) -> None:
        self.pool = kvpool.Pool(16, **SHAPE)
        self.mgr = kvpool.BlockManager(self.pool)
        self.a, self.b = self.mgr.allocate(range(6)), self.mgr.allocate(range(20, 29))
        self.dead = self.mgr.allocate([1])
        self.dead.free()
        self.other = kvpool.BlockManager(kvpool.Pool(4, **SHAPE))
        self.stranger = self.other.allocate([1, 2])
        self.held = self.pool.alloc(2)
        self.pool.set_fill(self.held, 4)

    def state(self) -> object:
        return (
            self.pool.stats,
            self.mgr.stats,
            [(s.tokens.tolist(), s.blocks.tolist(), s.n_computed) for s in (self.a, self.b)],
            self.stranger.tokens.tolist(),
        )


VALUE, TYPE = kvpool.InvalidArgument, kvpool.ArgumentTypeError
I32 = np.int32

CALLS: dict[str, tuple[Callable[[World], object], type[Exception], str]] = {
    # tokens
    "token -1": (lambda w: w.mgr.allocate([1, -1]), VALUE, r"tokens\[1\]: expected an int.*-1"),
    "token 2**32": (lambda w: w.mgr.allocate((2**32,)), VALUE, r"tokens\[0\].*4294967296"),
    "token in an int64 array": (
        lambda w: w.mgr.allocate(np.array([0, 1, -5])), VALUE, r"tokens\[2\].*-5"),
    "token in a uint64 array": (
        lambda w: w.mgr.allocate(np.array([2**40], np.uint64)), VALUE, r"tokens\[0\]"),
    "a bool token": (lambda w: w.mgr.allocate([1, True]), TYPE, r"tokens\[1\].*True \(bool\)"),
    "a float token": (lambda w: w.mgr.allocate([1.0]), TYPE, r"tokens\[0\].*float"),
    "a float array": (lambda w: w.mgr.allocate(np.ones(3)), TYPE, "float64"),
    "a bool array": (lambda w: w.mgr.allocate(np.ones(3, bool)), TYPE, "bool"),
    "text": (lambda w: w.mgr.allocate("text"), TYPE, "tokens: expected a list"),
    "bytes": (lambda w: w.mgr.allocate(b"text"), TYPE, "tokens: expected a list"),
    "None": (lambda w: w.mgr.allocate(None), TYPE, "tokens: expected a list"),
    "one int": (lambda w: w.mgr.allocate(5), TYPE, "tokens: expected a list"),
    "two dimensions": (
        lambda w: w.mgr.allocate(np.zeros((2, 2), np.uint32)), VALUE, "tokens: expected a 1-D"),
    "can_allocate": (lambda w: w.mgr.can_allocate([-1]), VALUE, r"tokens\[0\]"),
    "append text": (lambda w: w.a.append("5"), TYPE, "tokens: expected an integer"),
    "append a bool": (lambda w: w.a.append(False), TYPE, "tokens: expected an integer"),
    "append a float": (lambda w: w.a.append(1.5), TYPE, "tokens: expected an integer"),
    "append -1": (lambda w: w.a.append(-1), VALUE, "tokens: expected an integer"),
    "append in a row": (lambda w: w.a.append([1, 2**32]), VALUE, r"tokens\[1\]"),
    # options
    "namespace -1": (lambda w: w.mgr.allocate([1], namespace=-1), VALUE, "namespace: expected"),
    "namespace 2**64": (lambda w: w.mgr.allocate([1], namespace=2**64), VALUE, "namespace"),
    "namespace text": (lambda w: w.mgr.can_allocate([1], namespace="x"), TYPE, "namespace"),
    "namespace None": (lambda w: w.mgr.allocate([1], namespace=None), TYPE, "namespace"),
    "max_cached -1": (
        lambda w: w.mgr.allocate([1], max_cached_tokens=-1), VALUE, "max_cached_tokens"),
    "max_cached 1.0": (
        lambda w: w.mgr.allocate([1], max_cached_tokens=1.0), TYPE, "max_cached_tokens"),
    "resumed 1": (lambda w: w.mgr.allocate([1], resumed=1), TYPE, "resumed: expected True"),
    "match_last 0": (lambda w: w.mgr.can_allocate([1], match_last=0), TYPE, "match_last"),
    "positional options": (lambda w: w.mgr.allocate([1], 5), TypeError, "incompatible"),
    # one sequence
    "truncate -1": (lambda w: w.a.truncate(-1), VALUE, "n: expected an integer from 0"),
    "truncate beyond": (lambda w: w.a.truncate(7), VALUE, "to 7 tokens, the sequence has 6"),
    "truncate 1.0": (lambda w: w.a.truncate(1.0), TYPE, "n: expected an integer"),
    "truncate True": (lambda w: w.a.truncate(True), TYPE, "n: expected an integer"),
    "commit beyond": (lambda w: w.a.commit(7), VALUE, "7 tokens computed, the sequence has 6"),
    "commit -1": (lambda w: w.a.commit(-1), VALUE, "n_computed: expected an integer"),
    "commit True": (lambda w: w.a.commit(True), TYPE, "n_computed: expected an integer"),
    "pin 0": (lambda w: w.a.pin(0), VALUE, "seconds: expected a number above 0"),
    "pin nan": (lambda w: w.a.pin(float("nan")), VALUE, "seconds"),
    "pin inf": (lambda w: w.a.pin(float("inf")), VALUE, "seconds"),
    "pin -1": (lambda w: w.a.pin(-1.0), VALUE, "seconds"),
    "pin text": (lambda w: w.a.pin("1"), TYPE, "seconds: expected a number"),
    "pin True": (lambda w: w.a.pin(True), TYPE, "seconds: expected a number"),
    "pin 10**400": (lambda w: w.a.pin(10**400), VALUE, "seconds: expected a number above 0"),
    "slots first": (lambda w: w.a.slot_mapping(-1), VALUE, "first"),
    "slots n": (lambda w: w.a.slot_mapping(0, -1), VALUE, "n: expected"),
    "slots pad": (lambda w: w.a.slot_mapping(0, 1, pad=2**63), VALUE, "pad: .*64 bits"),
    "slots pad 1.0": (lambda w: w.a.slot_mapping(0, 1, pad=1.0), TYPE, "pad: expected an integer"),
    "slots pad True": (lambda w: w.a.slot_mapping(0, 1, pad=True), TYPE, "pad"),
    "slots too many": (lambda w: w.a.slot_mapping(0, 2**62), VALUE, "more than an array holds"),
    # rows of sequences
    "a freed one": (lambda w: w.mgr.append([w.a, w.dead], [1, 2]), VALUE, r"seqs\[1\].*is freed"),
    "a stranger": (
        lambda w: w.mgr.append([w.stranger], [1]), VALUE, r"seqs\[0\].*another manager"),
    "no sequence": (lambda w: w.mgr.append([w.a, 5], [1, 2]), TYPE, r"seqs\[1\].*found 5 \(int\)"),
    "None in a row": (lambda w: w.mgr.append([None], [1]), TYPE, r"seqs\[0\]"),
    "no row": (lambda w: w.mgr.append(5, [1]), TYPE, "seqs: expected a list or tuple"),
    "a bare sequence": (lambda w: w.mgr.commit(w.a), TYPE, "seqs: expected a list or tuple"),
    "twice": (lambda w: w.mgr.append([w.a, w.b, w.a], [1, 2, 3]), VALUE, r"seqs\[2\].*twice"),
    "fewer tokens": (
        lambda w: w.mgr.append([w.a, w.b], [1]), VALUE, "one for each sequence, 2, found 1"),
    "one token for all": (lambda w: w.mgr.append([w.a], 1), TYPE, "tokens: expected a list"),
    "a bad token": (lambda w: w.mgr.append([w.a, w.b], [1, -1]), VALUE, r"tokens\[1\]"),
    "commit twice": (lambda w: w.mgr.commit([w.a, w.a]), VALUE, r"seqs\[1\].*twice"),
    "commit many beyond": (
        lambda w: w.mgr.commit([w.a, w.b], [6, 10]), VALUE, "10 tokens computed.*has 9"),
    "commit lengths": (lambda w: w.mgr.commit([w.a], [1, 2]), VALUE, "n_computed: .* 1, found 2"),
    "free twice in a row": (lambda w: w.mgr.free([w.b, w.a, w.b]), VALUE, r"seqs\[2\].*twice"),
    "free a freed one": (lambda w: w.mgr.free([w.a, w.dead]), VALUE, r"seqs\[1\].*is freed"),
    "free a stranger": (lambda w: w.mgr.free([w.a, w.stranger]), VALUE, r"seqs\[1\]"),
    "free text": (lambda w: w.mgr.free("ab"), TYPE, r"seqs\[0\].*str"),
    "lens": (lambda w: w.mgr.seq_lens([w.dead]), VALUE, "is freed"),
    # tables
    "out rows": (
        lambda w: w.mgr.block_tables([w.a, w.b], np.zeros((3, 3), I32)), VALUE, "out: .*found 3"),
    "out columns": (
        lambda w: w.mgr.block_tables([w.a, w.b], np.zeros((2, 2), I32)), VALUE,
        r"seqs\[1\] has 3 blocks, the table 2 columns"),
    "out dtype": (
        lambda w: w.mgr.block_tables([w.a], np.zeros((1, 3), np.int64)), VALUE, "out: .*int64"),
    "out dimensions": (
        lambda w: w.mgr.block_tables([w.a], np.zeros(3, I32)), VALUE, "out: .*2 dim.*found 1"),
    "out order": (
        lambda w: w.mgr.block_tables([w.a, w.b], np.zeros((3, 4), I32).T[:2]), VALUE, "contiguous"),
    "out read-only": (
        lambda w: w.mgr.block_tables([w.a], np.broadcast_to(I32(0), (1, 3))), VALUE, "writable"),
    "out list": (lambda w: w.mgr.block_tables([w.a], [[0]]), TYPE, "out: expected an int32"),
    "scale 0": (lambda w: w.mgr.block_tables([w.a], scale=0), VALUE, "scale is 0"),
    "scale too large": (
        lambda w: w.mgr.block_tables([w.b], scale=2**31), VALUE, "exceeds int32"),
    "scale -1": (lambda w: w.mgr.block_tables([w.a], scale=-1), VALUE, "scale: expected"),
    "slots lengths": (lambda w: w.mgr.slot_mapping([w.a], [1, 2], 1), VALUE, "first: expected one"),
    "slots counts": (lambda w: w.mgr.slot_mapping([w.a], 1, [1, 1]), VALUE, "n: expected one"),
    "slots sum": (
        lambda w: w.mgr.slot_mapping([w.a, w.b], 0, 2**59 + 2**58), VALUE, "than an array holds"),
    # the index
    "reset": (lambda w: w.mgr.reset(-1), VALUE, "namespace"),
    "reset text": (lambda w: w.mgr.reset("all"), TYPE, "namespace"),
    "evict range": (lambda w: w.mgr.evict([0, 16]), VALUE, r"ids\[1\] is block 16, out of range"),
    "evict bool": (lambda w: w.mgr.evict(True), TYPE, "ids"),
    "adopt count": (
        lambda w: w.mgr.adopt(w.held, range(4)), VALUE, "4 tokens are in 1 blocks, found 2"),
    "adopt unheld": (lambda w: w.mgr.adopt([15], [1]), VALUE, "block 15, which nobody holds"),
    "adopt range": (lambda w: w.mgr.adopt([16], [1]), VALUE, "block 16"),
    "adopt twice": (
        lambda w: w.mgr.adopt([w.held[0]] * 2, range(8)), VALUE, r"ids\[1\].*once more"),
    "adopt proven": (lambda w: w.mgr.adopt([3], [1], proven=[1]), VALUE, r"proven\[0\]: expected"),
    "adopt proven bools": (lambda w: w.mgr.adopt([3], [1], proven=[True]), TYPE, "proven"),
    "import_ named": (lambda w: w.mgr.import_(b"", named=1), TYPE, "named"),
    "find one": (lambda w: w.mgr.find(3), TYPE, "hashes: expected a list"),
    "find negative": (lambda w: w.mgr.find([-1]), VALUE, r"hashes\[0\]"),
    "find take": (lambda w: w.mgr.find([1], take=1), TYPE, "take"),
    "export_block": (lambda w: w.a.export_block(9), VALUE, "index 9"),
    "export_block before": (lambda w: w.a.export_block(0, before="x"), TYPE, "before"),
    "adopt one id": (lambda w: w.mgr.adopt(3, [1]), TYPE, "ids: expected a list"),
    "import text": (lambda w: w.mgr.import_("x"), TYPE, "buffer: expected bytes"),
    "import strided": (lambda w: w.mgr.import_(np.zeros(9)[::2]), VALUE, "C-contiguous"),
    "import_sequence": (lambda w: w.mgr.import_sequence(b"", [-1]), VALUE, r"tokens\[0\]"),
    "drain -1": (lambda w: w.mgr.drain_events(-1), VALUE, "max: expected"),
    # a second manager, and copies
    "second manager": (lambda w: kvpool.BlockManager(w.pool), kvpool.Busy, "has a block manager"),
    "pickle": (lambda w: pickle.dumps(w.mgr), TypeError, "cannot be pickled"),
    "copy": (lambda w: copy.copy(w.mgr), TypeError, "cannot be copied"),
    "deepcopy": (lambda w: copy.deepcopy(w.mgr), TypeError, "cannot be copied"),
    "pickle a sequence": (lambda w: pickle.dumps(w.a), TypeError, "cannot be pickled"),
    "copy a sequence": (lambda w: copy.copy(w.a), TypeError, r"Use fork\(\)"),
    "deepcopy a sequence": (lambda w: copy.deepcopy([w.a]), TypeError, r"Use fork\(\)"),
    "a sequence by hand": (lambda w: kvpool.Sequence(), TypeError, "no constructor"),
    "a subclass of it": (lambda w: type("S", (kvpool.Sequence,), {}), TypeError, "subclass|base"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_wrong_arguments(what: str) -> None:
    call, error, text = CALLS[what]
    world = World()
    before = world.state()
    with pytest.raises(error, match=text):
        call(world)
    assert world.state() == before
    world.mgr.check()
    world.other.check()


FREED: dict[str, Callable[[kvpool.Sequence], object]] = {
    "append": lambda s: s.append(1),
    "fork": lambda s: s.fork(),
    "truncate": lambda s: s.truncate(0),
    "commit": lambda s: s.commit(),
    "commit some": lambda s: s.commit(0),
    "found": lambda s: s.found(0),
    "free": lambda s: s.free(),
    "pin": lambda s: s.pin(1),
    "slot_mapping": lambda s: s.slot_mapping(),
    "export": lambda s: s.export(),
    "export_block": lambda s: s.export_block(0),
    "export_iter": lambda s: s.export_iter(),
    "save": lambda s: s.save("never written"),
    "n_tokens": lambda s: s.n_tokens,
    "n_cached": lambda s: s.n_cached,
    "n_computed": lambda s: s.n_computed,
    "n_blocks": lambda s: s.n_blocks,
    "blocks": lambda s: s.blocks,
    "tokens": lambda s: s.tokens,
    "len": lambda s: len(s),
}


@pytest.mark.parametrize("what", FREED)
def test_a_freed_sequence_says_so(what: str) -> None:
    world = World()
    assert world.dead.is_freed
    with pytest.raises(kvpool.InvalidArgument, match="the sequence is freed"):
        FREED[what](world.dead)
    with world.dead:  # the end of the block finds nothing to do
        pass
    world.a.free()
    with pytest.raises(kvpool.InvalidArgument, match="freed"):
        FREED[what](world.a)
    world.mgr.close()
    with pytest.raises(kvpool.InvalidArgument, match="the manager is closed"):
        FREED[what](world.b)


CLOSED: dict[str, Callable[[World], object]] = {
    "allocate": lambda w: w.mgr.allocate([1]),
    "can_allocate": lambda w: w.mgr.can_allocate([1]),
    "append": lambda w: w.mgr.append([w.a], [1]),
    "commit": lambda w: w.mgr.commit([w.a]),
    "free": lambda w: w.mgr.free([w.a]),
    "block_tables": lambda w: w.mgr.block_tables([w.a]),
    "slot_mapping": lambda w: w.mgr.slot_mapping([w.a], 0, 1),
    "seq_lens": lambda w: w.mgr.seq_lens([w.a]),
    "reset": lambda w: w.mgr.reset(),
    "evict": lambda w: w.mgr.evict(0),
    "adopt": lambda w: w.mgr.adopt([0], [1]),
    "find": lambda w: w.mgr.find([1]),
    "import_": lambda w: w.mgr.import_(b""),
    "import_sequence": lambda w: w.mgr.import_sequence(b"", []),
    "load": lambda w: w.mgr.load("never read", []),
    "drain_events": lambda w: w.mgr.drain_events(),
    "stats": lambda w: w.mgr.stats,
    "meta_bytes": lambda w: w.mgr.meta_bytes,
    "check": lambda w: w.mgr.check(),
}


@pytest.mark.parametrize("what", CLOSED)
def test_a_closed_manager_says_so(what: str) -> None:
    world = World()
    world.mgr.close()
    world.mgr.close()
    assert world.mgr.closed
    with pytest.raises(kvpool.InvalidArgument, match="the manager is closed"):
        CLOSED[what](world)
    world = World()
    world.pool.close()
    assert world.mgr.closed
    with pytest.raises(kvpool.InvalidArgument, match="the pool is closed"):
        CLOSED[what](world)


def test_the_lists_of_operations_are_complete() -> None:
    public = {n for n in dir(kvpool.BlockManager) if not n.startswith("_")}
    assert public - {"close", "closed", "pool", "prefix_cache", "tiers", "watermark"} == set(CLOSED)
    public = {n for n in dir(kvpool.Sequence) if not n.startswith("_")}
    assert public - {"namespace", "is_freed", "block_tokens"} == set(FREED) - {"len", "commit some"}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"pool": None}, TYPE, "pool: expected a Pool, found None"),
        ({"pool": 3}, TYPE, "pool: expected a Pool"),
        ({"prefix_cache": "radix"}, VALUE, "'hash' or 'none', found 'radix'"),
        ({"prefix_cache": None}, TYPE, "'hash' or 'none'"),
        ({"prefix_cache": True}, TYPE, "'hash' or 'none'"),
        ({"watermark": 4}, VALUE, "watermark 4 of 4 blocks"),
        ({"watermark": -1}, VALUE, "watermark: expected"),
        ({"watermark": 1.0}, TYPE, "watermark: expected"),
        ({"events": 1}, TYPE, "events: expected True or False"),
    ],
)
def test_wrong_options(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    pool = kvpool.Pool(4, **SHAPE)
    with pytest.raises(error, match=text):
        kvpool.BlockManager(**({"pool": pool} | arguments))
    kvpool.BlockManager(pool).check()  # the failed one has left nothing behind
    pool.close()
    with pytest.raises(VALUE, match="the pool is closed"):
        kvpool.BlockManager(pool)


TOKENS = [1, 2, 3, 4, 5, 6, 7, 2**32 - 1]
ROWS: dict[str, Callable[[], object]] = {
    "list": lambda: TOKENS,
    "tuple": lambda: tuple(TOKENS),
    "uint32": lambda: np.array(TOKENS, np.uint32),
    "int64": lambda: np.array(TOKENS, np.int64),
    "uint64": lambda: np.array(TOKENS, np.uint64),
    "strided uint32": lambda: np.repeat(np.array(TOKENS, np.uint32), 3)[::3],
    "big-endian": lambda: np.array(TOKENS, ">u4"),
    "read-only": lambda: np.frombuffer(np.array(TOKENS, np.uint32).tobytes(), np.uint32),
    "unaligned": lambda: np.frombuffer(b"x" + np.array(TOKENS, np.uint32).tobytes(), np.uint8)[
        1:
    ].view(np.uint32),
    "NumPy integers": lambda: [np.int64(t) for t in TOKENS],
    "memoryview": lambda: memoryview(np.array(TOKENS, np.uint32)),
}


@pytest.mark.parametrize("row", ROWS)
def test_tokens_come_in_many_forms(row: str) -> None:
    pool = kvpool.Pool(16, **SHAPE)
    mgr = kvpool.BlockManager(pool)
    with mgr.allocate(ROWS[row]()) as seq:
        seq.append(ROWS[row]())  # type: ignore[arg-type]
        assert seq.tokens.tolist() == TOKENS * 2
        seq.commit()
        assert pool.hash(seq.blocks).tolist() == kvpool.block_hashes(TOKENS * 2, 4).tolist()
    assert mgr.can_allocate(ROWS[row](), match_last=True).n_cached == 8


def test_int32_tokens_and_ranges() -> None:
    mgr = kvpool.BlockManager(kvpool.Pool(16, **SHAPE))
    with mgr.allocate(range(8)) as a, mgr.allocate(np.arange(8, dtype=np.int32)) as b:
        assert a.tokens.tolist() == b.tokens.tolist() == list(range(8))
        assert a.append(np.uint16(3)) == []


def test_rows_of_sequences_may_be_any_iterable() -> None:
    world = World()
    world.mgr.commit(s for s in (world.a, world.b))
    assert (world.a.n_computed, world.b.n_computed) == (6, 9)
    assert world.mgr.seq_lens({1: world.a}.values()).tolist() == [6]

    def broken() -> Any:
        yield world.a
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.mgr.free(broken())
    assert not world.a.is_freed
    world.mgr.free(s for s in (world.a, world.b))
    assert world.mgr.stats.n_seqs == 0


def test_tables_of_ids_times_scale_fit_up_to_the_last() -> None:
    pool = kvpool.Pool(4, **SHAPE)
    mgr = kvpool.BlockManager(pool)
    with mgr.allocate(range(8)) as seq:  # blocks 0 and 1 of 0 .. 3
        assert mgr.block_tables([seq], scale=2**31 - 1).tolist() == [[0, 2**31 - 1]]
        with pytest.raises(kvpool.InvalidArgument, match="exceeds int32"):
            mgr.block_tables([seq], scale=2**31)


class Resizes:
    """An integer that takes an array's memory away while it is read."""

    def __init__(self, array: np.ndarray, value: int = 0) -> None:
        self.array, self.value = array, value

    def __index__(self) -> int:
        self.array.resize(0, refcheck=False)
        return self.value


@pytest.mark.parametrize("argument", ["namespace", "max_cached_tokens"])
@pytest.mark.parametrize("call", ["allocate", "can_allocate"])
def test_an_index_may_resize_the_tokens(call: str, argument: str) -> None:
    world = World()
    for _ in range(3):
        tokens = np.arange(100, 1 << 20, dtype=np.uint32)  # mapped: gone at once when resized
        result = getattr(world.mgr, call)(tokens, **{argument: Resizes(tokens)})
        if call == "allocate":
            assert len(result) == 0
            result.free()
        else:
            assert result == (True, 0, 0)
    world.mgr.check()


def test_an_index_may_resize_the_tokens_of_adopt() -> None:
    world = World()
    tokens = np.arange(8, dtype=np.uint32)
    with pytest.raises(VALUE, match="0 tokens are in 0 blocks, found 2"):
        world.mgr.adopt(world.held, tokens, namespace=Resizes(tokens))
    big = np.arange(1 << 20, dtype=np.uint32)
    world.mgr.adopt([], big, namespace=Resizes(big)).free()
    world.mgr.check()


def test_an_index_may_resize_an_envelope() -> None:
    world = World()
    for argument in ("tokens", "namespace"):
        envelope = np.frombuffer(world.pool.export(world.held), np.uint8).copy()
        envelope.resize(1 << 20)
        index = Resizes(envelope)
        tokens, namespace = ([index], 0) if argument == "tokens" else ([], index)
        with pytest.raises(kvpool.CorruptEnvelope, match="length 0"):
            world.mgr.import_sequence(envelope, tokens, namespace=namespace)
    crc = np.zeros(1 << 20, np.uint8)
    assert kvpool.crc32c(crc, Resizes(crc)) == 0
    world.mgr.check()
