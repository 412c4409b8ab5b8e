"""The tests of L8.3: :class:`kvpool.PagedKVCache` over a pool, against a contiguous cache.

They run over any pool that does what the cache asks of it: ours, or a learner's as a library. Run
as a program it speaks like a program of tests in C (c/tests/tl_test.h), so that the same reader
understands both:

    python -m kvpool.workbench.cache_suite [--library FILE] [--isolate] [--timeout S] [NAME ...]
    python -m kvpool.workbench.cache_suite --list
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool.paged_cache import PagedKVCache

from .ownpool import OwnPool, open_library

__all__ = ["TESTS", "Contiguous", "compare", "main"]

MakePool = Callable[..., Any]
Half = NDArray[np.float16]


# ---- the cache that is always right --------------------------------------------------------------


class Contiguous:
    """Every sequence has all its values to itself; blocks are only counted.

    A block is a number here, new each time one is taken, so that two caches agree when their tables
    are the same up to renaming.
    """

    def __init__(self, n_blocks: int, block_tokens: int, n_layers: int, heads: int, dim: int):
        self.n_blocks, self.size, self.n_layers = n_blocks, block_tokens, n_layers
        self.empty: Half = np.empty((heads, 0, dim), dtype=np.float16)
        self.values: dict[int, list[list[Half]]] = {}  # sequence, layer: K and V
        self.blocks: dict[int, list[int]] = {}
        self.holders: Counter[int] = Counter()
        self.next_block = 0

    def add(self, seq: int) -> None:
        self.values[seq] = [[self.empty, self.empty] for _ in range(self.n_layers)]
        self.blocks[seq] = []

    def fork(self, seq: int, child: int) -> None:
        self.values[child] = [list(kv) for kv in self.values[seq]]
        self.blocks[child] = list(self.blocks[seq])
        self.holders.update(self.blocks[seq])

    def length(self, seq: int, layer: int) -> int:
        return int(self.values[seq][layer][0].shape[1])

    def needed(self, seq: int, layer: int, n: int) -> int:
        """How many blocks an append of n positions takes: copies of shared ones, and new ones."""
        start = self.length(seq, layer)
        if n == 0:
            return 0
        touched = range(start // self.size, (start + n - 1) // self.size + 1)
        table = self.blocks[seq]
        return sum(i >= len(table) or self.holders[table[i]] > 1 for i in touched)

    @property
    def free_blocks(self) -> int:
        return self.n_blocks - sum(n > 0 for n in self.holders.values())

    def append(self, seq: int, layer: int, k: Half, v: Half) -> None:
        start, n = self.length(seq, layer), k.shape[1]
        table = self.blocks[seq]
        for i in range(start // self.size, -(-(start + n) // self.size) if n else 0):
            if i < len(table) and self.holders[table[i]] == 1:
                continue
            if i < len(table):
                self.holders[table[i]] -= 1
                table[i] = self.next_block
            else:
                table.append(self.next_block)
            self.holders[self.next_block] = 1
            self.next_block += 1
        kv = self.values[seq][layer]
        kv[0] = np.concatenate([kv[0], k], axis=1)
        kv[1] = np.concatenate([kv[1], v], axis=1)

    def drop(self, seq: int) -> None:
        self.holders.subtract(self.blocks.pop(seq))
        del self.values[seq]

    def fills(self, seq: int) -> list[int]:
        complete = min(self.length(seq, layer) for layer in range(self.n_layers))
        return [
            min(max(complete - i * self.size, 0), self.size) for i in range(len(self.blocks[seq]))
        ]


def compare(cache: PagedKVCache, pool: Any, model: Contiguous) -> None:
    """All that can be seen of the cache is what the contiguous one says, bit for bit."""
    names: dict[int, int] = {}
    for seq, table in model.blocks.items():
        ids = cache.block_table(seq)
        assert ids.dtype == np.int32
        assert len(ids) == len(table), f"sequence {seq} has {len(ids)} blocks, not {len(table)}"
        for id, block in zip(ids.tolist(), table, strict=True):
            assert names.setdefault(block, id) == id, f"sequence {seq} should share block {id}"
        for layer in range(model.n_layers):
            n = model.length(seq, layer)
            assert cache.seq_len(seq, layer) == n, f"sequence {seq}, layer {layer}: not {n} long"
            for is_v, got in enumerate(cache.gather(seq, layer)):
                want = model.values[seq][layer][is_v]
                same = np.array_equal(got.view(np.uint16), want.view(np.uint16))
                what = f"sequence {seq}, layer {layer}: {'KV'[is_v]}"
                assert same, f"{what} is not what was appended"
        for id, fill in zip(ids.tolist(), model.fills(seq), strict=True):
            found = pool.fill(id)
            assert found == fill, f"block {id} has fill {found}, but {fill} positions are complete"
    assert len(set(names.values())) == len(names), "two sequences write to one block"
    free = cache.num_free_blocks
    assert free == model.free_blocks, f"{free} blocks are free, not {model.free_blocks}"


# ---- tests ---------------------------------------------------------------------------------------

TESTS: dict[str, Callable[[MakePool], None]] = {}


def _test(function: Callable[[MakePool], None]) -> Callable[[MakePool], None]:
    TESTS[function.__name__] = function
    return function


def _some(rng: random.Random, heads: int, n: int, dim: int) -> NDArray[np.float32]:
    values = np.array([rng.gauss(0, 1) for _ in range(heads * n * dim)], dtype=np.float32)
    return values.reshape(heads, n, dim)


def _refused(error: type[Exception], function: Callable[..., object], *arguments: object) -> None:
    try:
        function(*arguments)
    except error:
        return
    raise AssertionError(f"{getattr(function, '__name__', function)}: not {error.__name__}")


@_test
def what_is_appended_is_gathered(make_pool: MakePool) -> None:
    """Pieces of every length, over block borders, come back in order."""
    for size in (1, 2, 5):
        pool = make_pool(30 // size + 1, size, 2, 3, 4)
        cache, rng = PagedKVCache(pool), random.Random(size)
        model = Contiguous(30 // size + 1, size, 2, 3, 4)
        seq = cache.add_seq()
        model.add(seq)
        for n in (1, 0, 2, 5, 7, 3, 12):
            for layer in range(2):
                k, v = _some(rng, 3, n, 4), _some(rng, 3, n, 4)
                cache.append(seq, layer, k, v)
                model.append(seq, layer, k.astype(np.float16), v.astype(np.float16))
                compare(cache, pool, model)
        cache.close()


@_test
def values_are_rounded_to_nearest_even(make_pool: MakePool) -> None:
    """Float32 and float64 become float16: nearest, ties to even, too large to infinity."""
    pairs = [
        (1 + 2**-11, 1.0), (1 + 3 * 2**-11, 1 + 2**-9), (1 + 2**-11 + 2**-20, 1 + 2**-10),
        (2**-25, 0.0), (3 * 2**-25, 2**-23), (-(2**-24), -(2**-24)), (65519.0, 65504.0),
        (65520.0, np.inf), (-1e30, -np.inf), (-0.0, -0.0),
    ]  # fmt: skip
    for dtype in (np.float32, np.float64):
        pool = make_pool(4, 4, 1, 1, len(pairs))
        cache = PagedKVCache(pool)
        seq = cache.add_seq()
        given = np.array([[[x for x, _ in pairs]]], dtype=dtype)
        want = np.array([[[y for _, y in pairs]]], dtype=np.float16)
        cache.append(seq, 0, given, -given)
        k, v = cache.gather(seq, 0)
        assert np.array_equal(k.view(np.uint16), want.view(np.uint16)), f"{k} is not {want}"
        assert np.array_equal(v.view(np.uint16), (-want).view(np.uint16))
        cache.close()


@_test
def a_fork_shares_until_it_writes(make_pool: MakePool) -> None:
    """A fork takes no block; the first append copies the half-full block and no other."""
    pool = make_pool(8, 4, 1, 1, 2)
    cache, rng = PagedKVCache(pool), random.Random(1)
    parent = cache.add_seq()
    cache.append(parent, 0, _some(rng, 1, 10, 2), _some(rng, 1, 10, 2))
    before = [x.copy() for x in cache.gather(parent, 0)]
    child = cache.fork(parent)
    assert cache.block_table(child).tolist() == cache.block_table(parent).tolist()
    assert cache.num_free_blocks == 5
    cache.append(child, 0, _some(rng, 1, 1, 2), _some(rng, 1, 1, 2))
    shared = cache.block_table(child) == cache.block_table(parent)
    assert shared.tolist() == [True, True, False], "only the last block may be copied"
    assert cache.num_free_blocks == 4
    for got, want in zip(cache.gather(parent, 0), before, strict=True):
        assert np.array_equal(got, want), "the parent sees what the child wrote"
    for got, want in zip(cache.gather(child, 0), before, strict=True):
        assert np.array_equal(got[:, :10], want), "the child's copy is not the parent's block"
    table = cache.block_table(child).tolist()
    cache.append(child, 0, _some(rng, 1, 1, 2), _some(rng, 1, 1, 2))
    assert cache.block_table(child).tolist() == table, "its own block was copied again"
    cache.free(parent)
    assert cache.num_free_blocks == 5, "the parent's last block did not come back"
    cache.close()
    assert cache.stats.free == 8


@_test
def out_of_blocks_changes_nothing(make_pool: MakePool) -> None:
    """An append that does not fit raises before a value, a length, a table or a count changes."""
    pool = make_pool(4, 2, 2, 1, 2)
    cache, rng = PagedKVCache(pool), random.Random(2)
    model = Contiguous(4, 2, 2, 1, 2)
    a = cache.add_seq()
    model.add(a)
    k = _some(rng, 1, 3, 2).astype(np.float16)
    cache.append(a, 0, k, k)
    model.append(a, 0, k, k)
    b = cache.fork(a)
    model.fork(a, b)
    long = _some(rng, 1, 4, 2).astype(np.float16)
    # Of b: a copy of the half-full block and two new ones, with two left.
    _refused(kvpool.OutOfBlocks, cache.append, b, 0, long, long)
    compare(cache, pool, model)
    _refused(kvpool.OutOfBlocks, cache.append, a, 1, _some(rng, 1, 9, 2), _some(rng, 1, 9, 2))
    compare(cache, pool, model)
    cache.append(b, 0, long[:, :2], long[:, :2])  # a copy and one new one: the last
    model.append(b, 0, long[:, :2], long[:, :2])
    compare(cache, pool, model)
    _refused(kvpool.OutOfBlocks, cache.append, a, 1, k, k)  # only a copy, of the first block
    compare(cache, pool, model)
    cache.free(b)
    model.drop(b)
    cache.append(a, 1, k, k)
    model.append(a, 1, k, k)
    compare(cache, pool, model)
    cache.close()


@_test
def fill_is_what_every_layer_holds(make_pool: MakePool) -> None:
    """Layers that are written one after another: a position counts when the last has it."""
    pool = make_pool(6, 4, 3, 1, 2)
    cache, rng = PagedKVCache(pool), random.Random(3)
    seq = cache.add_seq()
    fills = []
    for layer, n in ((0, 6), (2, 5), (1, 3), (1, 4), (2, 2), (0, 2)):
        cache.append(seq, layer, _some(rng, 1, n, 2), _some(rng, 1, n, 2))
        fills.append([pool.fill(id) for id in cache.block_table(seq).tolist()])
    assert fills == [[0, 0], [0, 0], [3, 0], [4, 1], [4, 2], [4, 3]], f"fills {fills}"
    cache.close()


@_test
def cached_blocks_make_room(make_pool: MakePool) -> None:
    """Blocks that others left in the prefix index are taken when nothing is free."""
    pool = make_pool(3, 2, 1, 1, 2)
    for hash in (11, 12):
        id = int(pool.alloc(1)[0])
        pool.set_fill(id, 2)
        pool.register(id, hash)
        pool.unref([id])
    assert (pool.stats.free, pool.stats.cached) == (1, 2)
    cache, rng = PagedKVCache(pool), random.Random(4)
    assert cache.num_free_blocks == 3
    seq = cache.add_seq()
    k = _some(rng, 1, 5, 2)
    cache.append(seq, 0, k, k)
    assert np.array_equal(cache.gather(seq, 0)[0], k.astype(np.float16))
    assert (pool.stats.cached, pool.stats.evictions) == (0, 2)
    cache.close()
    assert pool.stats.free == 3


@_test
def freed_blocks_serve_others(make_pool: MakePool) -> None:
    """Sequences come and go through a pool that holds two of them; nobody sees another's values."""
    pool = make_pool(6, 2, 1, 1, 2)
    cache, rng = PagedKVCache(pool), random.Random(5)
    old = cache.add_seq()
    kept = _some(rng, 1, 6, 2).astype(np.float16)
    cache.append(old, 0, kept, kept)
    for _ in range(40):
        seq = cache.add_seq()
        k = _some(rng, 1, 6, 2).astype(np.float16)
        cache.append(seq, 0, k, k)
        assert cache.num_free_blocks == 0
        assert np.array_equal(cache.gather(seq, 0)[0], k)
        assert np.array_equal(cache.gather(old, 0)[1], kept)
        cache.free(seq)
    cache.close()
    assert cache.stats.free == 6


@_test
def wrong_calls_are_refused_and_change_nothing(make_pool: MakePool) -> None:
    """Sequences and layers that are not there, other shapes, integers; a closed cache."""
    pool = make_pool(4, 2, 2, 2, 3)
    cache = PagedKVCache(pool)
    seq = cache.add_seq()
    k = np.zeros((2, 1, 3), dtype=np.float32)
    bad = kvpool.InvalidArgument
    _refused(bad, cache.append, seq + 1, 0, k, k)
    _refused(bad, cache.append, seq, 2, k, k)
    _refused(bad, cache.append, seq, -1, k, k)
    _refused(bad, cache.append, seq, 0, k[:1], k)
    _refused(bad, cache.append, seq, 0, k, k[:, :0])
    _refused(bad, cache.append, seq, 0, k[..., :2], k[..., :2])
    _refused(bad, cache.append, seq, 0, k[0], k[0])
    _refused(kvpool.ArgumentTypeError, cache.append, seq, 0, k.astype(np.int64), k)
    _refused(kvpool.ArgumentTypeError, cache.append, seq, 0, k.tolist(), k)
    _refused(bad, cache.gather, seq, 2)
    _refused(bad, cache.seq_len, seq, 5)
    _refused(bad, cache.block_table, 99)
    _refused(bad, cache.fork, None)
    cache.free(seq)
    _refused(bad, cache.free, seq)
    assert cache.stats.free == 4
    cache.close()
    cache.close()
    _refused(bad, cache.add_seq)


@_test
def random_histories_equal_a_contiguous_cache(make_pool: MakePool) -> None:
    """Append, fork and free at random in tiny pools, layers out of step: always the same bits."""
    for seed in range(40):
        rng = random.Random(seed)
        shape = (rng.randint(2, 9), rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 2), 2)
        pool = make_pool(*shape)
        cache, model = PagedKVCache(pool), Contiguous(*shape)
        for step in range(40):
            live = list(model.blocks)
            try:
                _one_step(rng, cache, model, live, shape)
                compare(cache, pool, model)
            except AssertionError as error:
                raise AssertionError(f"history {seed}, step {step}: {error}") from None
        cache.close()
        assert cache.stats.free == shape[0], f"history {seed}: blocks are lost"


def _one_step(
    rng: random.Random,
    cache: PagedKVCache,
    model: Contiguous,
    live: list[int],
    shape: tuple[int, int, int, int, int],
) -> None:
    _, _, n_layers, heads, dim = shape
    what = rng.random()
    if not live or what < 0.1:
        model.add(cache.add_seq())
    elif what < 0.2:
        seq = rng.choice(live)
        model.fork(seq, cache.fork(seq))
    elif what < 0.3:
        seq = rng.choice(live)
        cache.free(seq)
        model.drop(seq)
    else:
        seq, layer, n = rng.choice(live), rng.randrange(n_layers), rng.randint(0, 5)
        k, v = _some(rng, heads, n, dim), _some(rng, heads, n, dim)
        if model.needed(seq, layer, n) > model.free_blocks:
            _refused(kvpool.OutOfBlocks, cache.append, seq, layer, k, v)
        else:
            cache.append(seq, layer, k, v)
            model.append(seq, layer, k.astype(np.float16), v.astype(np.float16))


# ---- the program ---------------------------------------------------------------------------------


def _reference(n: int, size: int, layers: int, heads: int, dim: int) -> kvpool.Pool:
    return kvpool.Pool(n, size, n_layers=layers, n_kv_heads=heads, head_dim=dim)


def _place(error: BaseException) -> str:
    """The test's own line, and what it says: FILE:LINE: TEXT."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == __file__] or frames
    text = str(error) or type(error).__name__
    if not isinstance(error, AssertionError):
        text = f"{type(error).__name__}: {text}"
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {' '.join(text.split())}"


def _run_one(name: str, make_pool: MakePool) -> bool:
    try:
        TESTS[name](make_pool)
    except Exception as error:
        print(_place(error))
        return False
    return True


def _isolated(name: str, make_pool: MakePool, limit_s: float) -> bool:
    """The same in a process of its own: a crash or an endless loop is one failed test."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        passed = _run_one(name, make_pool)
        sys.stdout.flush()
        os._exit(0 if passed else 1)
    end = time.monotonic() + limit_s
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            print(f"    no end after {limit_s:.0f} s")
            return False
        time.sleep(0.001)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        print(f"    killed by signal {number} ({signal.strsignal(number)})")
    elif os.WEXITSTATUS(status) > 1:
        print(f"    the process ended with code {os.WEXITSTATUS(status)}")
    return status == 0


def main(argv: list[str] | None = None) -> int:
    """Runs the suite; the exit code is the verdict.

    >>> main(["what_is_appended_is_gathered"])          # doctest: +ELLIPSIS
    ok   what_is_appended_is_gathered (... ms)
    1 passed, 0 failed
    0
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, help="a pool in C; without it, ours")
    parser.add_argument("--isolate", action="store_true")
    parser.add_argument("--timeout", type=float, default=20)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args(argv)
    if not __debug__:
        parser.error("the tests are assertions: python -O leaves them out")
    if args.list:
        print("\n".join(TESTS))
        return 0
    make_pool: MakePool = _reference
    if args.library is not None:
        library = open_library(args.library)

        def make_pool(*shape: int) -> OwnPool:
            return OwnPool(library, *shape)

    n_failed = 0
    for name in args.names or TESTS:
        start = time.monotonic()
        passed = (
            _isolated(name, make_pool, args.timeout) if args.isolate else _run_one(name, make_pool)
        )
        n_failed += not passed
        word = "ok  " if passed else "FAIL"
        print(f"{word} {name} ({1e3 * (time.monotonic() - start):.1f} ms)", flush=True)
    n = len(args.names or TESTS)
    print(f"{n - n_failed} passed, {n_failed} failed")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
