"""Every kind of argument, right and wrong: the right result where a conversion is exact, else an
error that names the argument, what was expected and what was found, and nothing changed."""

from __future__ import annotations

import array
import ctypes
import mmap
import pickle
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

import kvpool
from pool_support import MakePool

INT_DTYPES = [np.dtype(c) for c in "bBhHiIlLqQ"]


class Index:
    def __init__(self, value: object) -> None:
        self.value = value

    def __index__(self) -> object:
        return self.value


@pytest.fixture
def held(make_pool: MakePool) -> kvpool.Pool:
    """A pool of 8 blocks, all full and held once."""
    pool = make_pool(8)
    pool.set_fill(pool.alloc(8), 2)
    return pool


GOOD_ROWS: list[Callable[[], object]] = [
    lambda: [1, 2, 5],
    lambda: (1, 2, 5),
    lambda: [np.uint32(1), np.int64(2), Index(5)],
    lambda: array.array("q", [1, 2, 5]),
    lambda: memoryview(array.array("I", [1, 2, 5])),
    lambda: (ctypes.c_int32 * 3)(1, 2, 5),
    lambda: np.array([1, 2, 5], ">u4"),
    lambda: np.array([1, 2, 5], ">i8"),
    lambda: np.array([5, 9, 2, 9, 1], np.uint32)[::-2],
    lambda: np.array([5, 9, 2, 9, 1], ">i4")[::-2],
    lambda: np.array([[1, 9], [2, 9], [5, 9]], np.int16)[:, 0],
    lambda: np.frombuffer(b"\0" + np.array([1, 2, 5], np.uint32).tobytes(), "<u4", 3, 1),
    *[lambda d=d: np.array([1, 2, 5], d) for d in INT_DTYPES],
]


@pytest.mark.parametrize("row", GOOD_ROWS)
def test_rows_of_every_kind_are_read_exactly(held: kvpool.Pool, row: Callable[[], object]) -> None:
    held.ref(row())
    assert held.refs(range(8)).tolist() == [1, 2, 2, 1, 1, 2, 1, 1]


@pytest.mark.parametrize(
    "row", [range(8), range(2, 7), range(7, -1, -1), range(0, 8, 3), range(3, 3), range(5, 6)]
)
def test_ranges_are_read_in_their_order(held: kvpool.Pool, row: range) -> None:
    held.set_fill(row, [i % 3 for i in row])
    assert held.fill(row).tolist() == [i % 3 for i in row]


@pytest.mark.parametrize(
    "empty", [[], (), range(0), np.array([]), np.array([], np.uint32), array.array("I")]
)
def test_an_empty_row_is_fine_whatever_its_dtype(held: kvpool.Pool, empty: object) -> None:
    held.ref(empty)
    held.unref(empty)
    assert held.refs(empty).shape == (0,)
    assert held.lookup(empty).shape == (0,)
    assert held.cow(empty).shape == (0,)
    assert held.register(empty, empty).shape == (0,)
    assert len(held.export(empty)) == 32


@pytest.mark.parametrize(
    "scalar",
    [3, Index(3), np.array(3), np.array(3, ">i2"), *[d.type(3) for d in INT_DTYPES]],
    ids=repr,
)
def test_scalars_of_every_kind_give_scalars(held: kvpool.Pool, scalar: object) -> None:
    assert type(held.cow(scalar)) is int
    held.ref(scalar)
    assert held.refs(scalar) == 2
    assert type(held.refs(scalar)) is int
    assert held.block(scalar).shape == held.block(3).shape


WRONG_TYPES = [
    None, True, False, np.True_, 1.0, 1.5, np.float32(1), np.float64(1), 1j, Fraction(1),
    "1", b"1", bytearray(4), {1}, {1: 2}, object(), int, Index, (x for x in [1]),
    np.array(1.0), np.array(True), np.array("1"), np.array([1.0]), np.array([True]),
    np.array([1], object), np.array(["1"]), np.array([1j]), np.array([1], "m8[s]"),
    np.array([(1,)], [("a", "u4")]),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=lambda x: repr(x)[:30])
def test_a_wrong_kind_of_object_is_a_type_error_that_names_it(
    held: kvpool.Pool, wrong: object
) -> None:
    calls = [held.ref, held.unref, held.refs, held.cow, held.fill, held.hash, held.export]
    for call in calls:
        with pytest.raises(kvpool.ArgumentTypeError, match=r"^ids: expected .*, found "):
            call(wrong)
    with pytest.raises(kvpool.ArgumentTypeError, match=r"^hashes: expected .*, found "):
        held.lookup(wrong)
    with pytest.raises(kvpool.ArgumentTypeError, match=r"^id: expected .*, found "):
        held.block(wrong)
    with pytest.raises(kvpool.ArgumentTypeError, match=r"^tokens: expected .*, found "):
        kvpool.block_hashes(wrong)
    if wrong is not None:
        with pytest.raises(kvpool.ArgumentTypeError, match=r"^n: expected .*, found "):
            held.alloc(wrong)
    assert held.refs(range(8)).tolist() == [1] * 8


@pytest.mark.parametrize("wrong", [None, True, np.True_, 1.0, "1", [1], np.array([1.0]), object()])
def test_a_wrong_item_is_named_by_its_position(held: kvpool.Pool, wrong: object) -> None:
    for row in ([1, 2, wrong], (1, 2, wrong)):
        with pytest.raises(kvpool.ArgumentTypeError, match=r"^ids\[2\]: expected an integer"):
            held.unref(row)
    assert held.refs(range(8)).tolist() == [1] * 8


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (-1, "ids: expected an integer from 0 to 4294967295, found -1"),
        (2**32, "ids: .*, found 4294967296"),
        (10**30, "ids: .*, found 10{30}"),
        (np.int64(-7), "ids: .*-7"),
        (np.array(-7), "ids: .*-7"),
        ([0, -1], r"ids\[1\]: .*, found -1"),
        ([0, 2**32], r"ids\[1\]: .*, found 4294967296"),
        ([0, 1, 2**70], r"ids\[2\]: .*, found 1180591620717411303424"),
        ((0, Index(-3)), r"ids\[1\]: "),
        (np.array([0, 1, -1]), r"ids\[2\]: .*, found -1"),
        (np.array([0, -128], np.int8), r"ids\[1\]: .*, found -128"),
        (np.array([0, 2**32], np.uint64), r"ids\[1\]: .*, found 4294967296"),
        (np.array([0, -1, 2], ">i8"), r"ids\[1\]: .*, found -1"),
        (np.array([5, 0, -6, 0], np.int32)[::2], r"ids\[1\]: .*, found -6"),
        (range(-1, 3), r"ids\[0\]: .*, found -1"),
        (range(2**32 - 2, 2**32 + 1), r"ids\[2\]: .*, found 4294967296"),
        (range(3, -2, -1), r"ids\[4\]: .*, found -1"),
        (np.zeros((2, 2), np.uint32), "ids: expected a 1-D array, found one of 2 dimensions"),
        (np.zeros((1, 1), np.int64), "ids: expected a 1-D array, found one of 2 dimensions"),
        (8, "block 8 is out of range"),
        ([0, 8], r"ids\[1\] is block 8, out of range"),
        (2**32 - 1, "block 4294967295 is out of range"),
    ],
    ids=repr,
)
def test_a_wrong_value_is_named(held: kvpool.Pool, row: object, text: str) -> None:
    with pytest.raises(kvpool.InvalidArgument, match=text) as error:
        held.unref(row)
    assert not isinstance(error.value, TypeError)
    assert held.refs(range(8)).tolist() == [1] * 8


@pytest.mark.parametrize(
    "call", ["refs", "fill", "hash", "block", "export", "set_fill", "register"]
)
def test_every_operation_refuses_an_id_out_of_range(held: kvpool.Pool, call: str) -> None:
    more = {"set_fill": ([1, 1],), "register": ([1, 1],)}.get(call, ())
    with pytest.raises(kvpool.InvalidArgument, match="out of range"):
        getattr(held, call)(8 if call == "block" else [0, 8], *more)


@pytest.mark.parametrize("call", ["refs", "fill", "hash"])
def test_reading_one_block_out_of_range_names_it(held: kvpool.Pool, call: str) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="id 8 is out of range: the pool has 8 blocks"):
        getattr(held, call)(8)


def test_hashes_have_64_bits(held: kvpool.Pool) -> None:
    held.set_fill(0, 2)
    assert held.register(0, 2**64 - 1)
    for form in (2**64 - 1, np.uint64(2**64 - 1), np.array(2**64 - 1, np.uint64)):
        assert held.lookup(form) == 0
    for row in ([2**64 - 1], np.array([2**64 - 1], np.uint64), np.array([2**64 - 1], ">u8")):
        assert held.lookup(row).tolist() == [0]
    for bad in (-1, 2**64, [2**64], [-1], np.array([-1]), np.array([-1], np.int8)):
        with pytest.raises(kvpool.InvalidArgument, match="from 0 to 18446744073709551615"):
            held.lookup(bad)


def test_scalars_and_rows_do_not_mix(held: kvpool.Pool) -> None:
    with pytest.raises(kvpool.ArgumentTypeError, match="hashes: expected an integer"):
        held.register(0, [1])
    with pytest.raises(kvpool.ArgumentTypeError, match="hashes: expected a list"):
        held.register([0], 1)
    with pytest.raises(kvpool.ArgumentTypeError, match="ids: expected a list"):
        held.export(0)
    with pytest.raises(kvpool.ArgumentTypeError, match="id: expected an integer"):
        held.block([0])
    with pytest.raises(kvpool.ArgumentTypeError, match="n: expected an integer"):
        held.alloc([1])


def test_an_error_of_the_object_itself_goes_through(held: kvpool.Pool) -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("mine")

    class BrokenArray:
        def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
            raise RuntimeError("mine")

    for bad in (Broken(), [0, Broken()]):
        with pytest.raises(RuntimeError, match="mine"):
            held.unref(bad)
    with pytest.raises(kvpool.ArgumentTypeError, match="BrokenArray cannot be read") as error:
        held.unref(BrokenArray())
    assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(kvpool.ArgumentTypeError, match=r"ids\[0\]"):
        held.unref([Index("no int")])


def test_a_list_that_changes_while_it_is_read_is_read_safely(held: kvpool.Pool) -> None:
    row: list[object] = []

    class Shrink:
        def __index__(self) -> int:
            row.clear()
            return 1

    class Grow:
        def __index__(self) -> int:
            if len(row) < 2000:
                row.extend([2] * 500)
            return 1

    row[:] = [0, Shrink(), *range(6)]
    held.ref(row)
    assert held.refs([0, 1, 2]).tolist() == [2, 2, 1]
    row[:] = [Grow() for _ in range(4)]
    held.ref(row)
    assert held.refs(1) == 6
    assert held.refs(2) == 2001


def test_long_rows_are_read_whole(make_pool: MakePool) -> None:
    n = 10_000
    pool = make_pool(n)
    ids = pool.alloc(n)
    rows = [ids, ids.tolist(), tuple(ids.tolist()), range(n), ids[::-1], ids.astype(np.int64)]
    for row in rows:
        pool.ref(row)
    assert (pool.refs(ids) == 1 + len(rows)).all()


@pytest.mark.parametrize("name", ["n_blocks", "block_tokens", "n_layers", "n_kv_heads", "head_dim"])
def test_dimensions_are_checked_by_name(name: str) -> None:
    shape = {"n_blocks": 2, "block_tokens": 2, "n_layers": 1, "n_kv_heads": 1, "head_dim": 2}
    with pytest.raises(kvpool.InvalidArgument, match=f"{name} is 0, expected at least 1"):
        kvpool.Pool(**shape | {name: 0})
    for bad in (-1, 2**32):
        with pytest.raises(kvpool.InvalidArgument, match=f"^{name}: .*found {bad}"):
            kvpool.Pool(**shape | {name: bad})
    for wrong in (1.0, True, "2", None, [2]):
        with pytest.raises(kvpool.ArgumentTypeError, match=f"^{name}: "):
            kvpool.Pool(**shape | {name: wrong})


@pytest.mark.parametrize("name", ["touch", "huge_pages"])
@pytest.mark.parametrize("wrong", [None, 1, 0, "yes"])
def test_flags_are_bools(name: str, wrong: object) -> None:
    with pytest.raises(kvpool.ArgumentTypeError, match=f"{name}: expected True or False"):
        kvpool.Pool(1, n_layers=1, n_kv_heads=1, head_dim=2, **{name: wrong})


def test_missing_and_surplus_arguments_are_type_errors(pool: kvpool.Pool) -> None:
    for call in (
        lambda: kvpool.Pool(4),
        lambda: kvpool.Pool(4, 2, 1, 1, 2),
        lambda: kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=2, dtype="float16"),
        lambda: pool.alloc(1, 2),
        lambda: pool.ref(),
        lambda: pool.ref(id=1),
    ):
        with pytest.raises(TypeError):
            call()


def test_arguments_have_names(pool: kvpool.Pool) -> None:
    ids = pool.alloc(n=2)
    pool.ref(ids=ids)
    pool.unref(ids=ids)
    pool.set_fill(ids=ids, n_tokens=2)
    pool.register(ids=ids, hashes=[1, 2])
    assert pool.lookup(hashes=1) == 0
    assert pool.export_bytes(n=1) == 60
    assert pool.import_(buffer=pool.export(ids=[0])).shape == (1,)
    assert pool.block(id=0).shape == (1, 2, 1, 2, 2)


@pytest.mark.parametrize(
    "bytes_like",
    [
        memoryview(b"\x01\x02"),
        memoryview(bytearray(2)),
        memoryview(b"\x01\x02").cast("c"),
        mmap.mmap(-1, 2),
        pickle.PickleBuffer(b"\x01\x02"),
    ],
)
def test_views_of_bytes_are_refused_like_bytes(held: kvpool.Pool, bytes_like: object) -> None:
    for call in (held.ref, held.export, held.lookup, kvpool.block_hashes):
        with pytest.raises(kvpool.ArgumentTypeError, match=r"^(ids|hashes|tokens): expected"):
            call(bytes_like)
    assert held.refs(range(8)).tolist() == [1] * 8


def test_typed_views_of_bytes_are_rows(held: kvpool.Pool) -> None:
    for row in (memoryview(bytes(8)).cast("I"), array.array("B", [0, 0]), (ctypes.c_uint8 * 2)()):
        held.ref(row)
    assert held.refs(0) == 7


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
def test_masked_arrays_are_refused(held: kvpool.Pool, dtype: type) -> None:
    masked = np.ma.array([1, 2], dtype=dtype, mask=[False, True])

    class Holder:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return masked

    mgr = kvpool.BlockManager(held)
    for row in (masked, masked[:1], np.ma.array(1, dtype=dtype), Holder(), [masked[1]]):
        for call in (held.ref, held.unref, held.lookup, mgr.allocate, mgr.can_allocate):
            with pytest.raises(kvpool.ArgumentTypeError):
                call(row)
    for item in (np.ma.array(1, dtype=dtype, mask=True), np.ma.masked):
        for argument in (item, [item]):
            with pytest.raises(kvpool.ArgumentTypeError):
                held.ref(argument)
    assert held.refs(range(8)).tolist() == [1] * 8


def test_ranges_beyond_64_bits(held: kvpool.Pool) -> None:
    for row in (range(2**63), range(10**30), range(0, 2**64, 1), range(0, -(2**70), -1)):
        with pytest.raises(kvpool.InvalidArgument, match="ids: expected fewer integers"):
            held.ref(row)
        with pytest.raises(kvpool.InvalidArgument, match="hashes: expected fewer integers"):
            held.lookup(row)
    assert held.lookup(range(0, 2**64 - 1, 2**63 + 1)).tolist() == [-1, -1]
    assert held.lookup(range(2**64 - 1, 0, -(2**63) - 1)).tolist() == [-1, -1]


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_a_manager_of_a_pool_that_was_never_initialised() -> None:
    class Lazy(kvpool.Pool):
        def __init__(self) -> None:
            pass

    class LazyManager(kvpool.BlockManager):
        def __init__(self) -> None:
            pass

    for pool in (Lazy(), kvpool.Pool.__new__(kvpool.Pool)):
        with pytest.raises(kvpool.ArgumentTypeError, match="pool: the Pool was never initialised"):
            kvpool.BlockManager(pool)
        assert "never initialised" in repr(pool)
    assert "never initialised" in repr(LazyManager())
