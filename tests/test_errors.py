"""One exception for each status of the C library, with its text."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import kvpool
from kvpool import _core, errors

TABLE = [
    ("TL_EINVAL", 1, kvpool.InvalidArgument, (kvpool.KvPoolError, ValueError)),
    ("TL_ENOMEM", 2, MemoryError, (MemoryError,)),
    ("TL_ESHAPE", 3, kvpool.ShapeMismatch, (kvpool.KvPoolError, ValueError)),
    ("TL_EDTYPE", 4, kvpool.DtypeMismatch, (kvpool.KvPoolError, TypeError)),
    ("TL_EFULL", 5, kvpool.PoolFull, (kvpool.KvPoolError,)),
    ("TL_ENOTFOUND", 6, kvpool.NotFound, (kvpool.KvPoolError, KeyError)),
    ("TL_EFORMAT", 7, kvpool.CorruptEnvelope, (kvpool.KvPoolError, ValueError)),
    ("TL_EBUSY", 8, kvpool.Busy, (kvpool.KvPoolError,)),
    ("TL_EUNSUPPORTED", 9, kvpool.Unsupported, (kvpool.KvPoolError,)),
    ("TL_EIO", 10, kvpool.StorageError, (kvpool.KvPoolError, OSError)),
]


@pytest.mark.parametrize(("name", "status", "cls", "bases"), TABLE)
def test_every_status_has_its_exception(
    name: str, status: int, cls: type[Exception], bases: tuple[type[Exception], ...]
) -> None:
    with pytest.raises(cls) as error:
        _core._raise_status(status, f"tl_kv_call: {name}")
    assert type(error.value) is cls
    assert str(error.value) == f"tl_kv_call: {name}"
    assert all(isinstance(error.value, base) for base in bases)
    assert errors.BY_STATUS[status] is cls


def test_the_table_is_the_headers() -> None:
    header = Path(kvpool.get_include(), "tinyllm", "abi.h").read_text()
    statuses = dict(re.findall(r"^    (TL_E[A-Z]+) = (\d+),?", header, re.MULTILINE))
    assert {name: int(n) for name, n in statuses.items()} == {n: s for n, s, _, _ in TABLE}


@pytest.mark.parametrize("status", [0, 11, -1, 2**31 - 1])
def test_an_unknown_status_is_the_base_error(status: int) -> None:
    with pytest.raises(kvpool.KvPoolError) as error:
        _core._raise_status(status, "what")
    assert type(error.value) is kvpool.KvPoolError


def test_wrong_types_are_type_errors_and_invalid_arguments() -> None:
    assert issubclass(kvpool.ArgumentTypeError, kvpool.InvalidArgument)
    assert issubclass(kvpool.ArgumentTypeError, TypeError)
    assert issubclass(kvpool.TransferError, (kvpool.KvPoolError, ConnectionError))


def test_all_errors_are_public_documented_and_pickled() -> None:
    for name in errors.__all__:
        if name == "BY_STATUS":
            continue
        cls = getattr(errors, name)
        assert getattr(kvpool, name) is cls
        assert cls.__doc__
        again = pickle.loads(pickle.dumps(cls("text")))
        assert type(again) is cls
        assert str(again) == "text"


def test_real_calls_raise_them(pool: kvpool.Pool) -> None:
    other = kvpool.Pool(4, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=2)
    block = other.alloc()
    other.set_fill(block, 1)
    with pytest.raises(kvpool.ShapeMismatch, match="block_tokens 4 at offset 12, the pool has 2"):
        pool.import_(other.export([block]))
    with pytest.raises(kvpool.CorruptEnvelope, match="length 3"):
        pool.import_(b"abc")
    with pytest.raises(kvpool.PoolFull, match="5 blocks needed, 4 are free and 0 cached"):
        pool.alloc(5)
    with pytest.raises(kvpool.InvalidArgument, match="nobody holds block 1"):
        pool.unref(1)


def test_errors_of_two_threads_do_not_mix(pool: kvpool.Pool) -> None:
    import threading

    texts: dict[int, set[str]] = {}

    def work(block: int) -> None:
        texts[block] = set()
        for _ in range(2000):
            try:
                pool.unref(block)
            except kvpool.InvalidArgument as error:
                texts[block].add(str(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: {f"tl_kv_unref: nobody holds block {i}"} for i in range(4)}
