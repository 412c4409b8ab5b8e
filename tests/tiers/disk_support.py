"""Records to put on disks, and an ``os`` that counts, records or kills.

Run as a script it is the crash test: ``python disk_support.py FOLDER`` kills a writer with SIGKILL
at every write of a workload, in the middle of it and after it, and opens what is left.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
import kvpool.tiers.disk
from kvpool.tiers import Key, Layout
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.record import ENVELOPE_AT

LAYOUT = Layout(4, n_layers=2, n_kv_heads=1, head_dim=8, model="disk")
SIZE = 128 << 10  # 28 slots


@functools.cache
def records(n: int, first: int = 0) -> list[tuple[Key, bytes]]:
    """The blocks of one prompt, in order; another prompt for another ``first``."""
    pool = kvpool.Pool(1, 4, n_layers=2, n_kv_heads=1, head_dim=8)
    block = pool.alloc()
    pool.set_fill(block, 4)
    items = []
    for i, key in enumerate(LAYOUT.keys(range(first, first + 4 * n))):
        pool.block(block)[:] = np.frombuffer(values(key.hash), np.float16).reshape(2, 2, 1, 4, 8)
        record = bytearray(LAYOUT.record_bytes)
        pool.export_into([block], memoryview(record)[ENVELOPE_AT:])
        record[ENVELOPE_AT + 28 : ENVELOPE_AT + 36] = key.hash.to_bytes(8, "little")
        crc = kvpool.crc32c(memoryview(record)[ENVELOPE_AT:-4])
        record[-4:] = crc.to_bytes(4, "little")
        LAYOUT.seal(memoryview(record), key, i)
        items.append((key, bytes(record)))
    return items


def is_right(key: Key, record: Any) -> bool:
    """Whether a record passes and holds the block's own values. A wrong one that passes raises."""
    try:
        payload = LAYOUT.open(record, key)
    except kvpool.CorruptEnvelope:
        return False
    assert payload.tobytes() == values(key.hash)
    return True


@functools.cache
def values(seed: int) -> bytes:
    values = np.random.default_rng(seed).standard_normal((2, 2, 1, 4, 8))
    return values.astype(np.float16).tobytes()


class Os:
    """The module ``os`` with some functions replaced."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@contextlib.contextmanager
def replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """``os`` as the disk tier sees it."""
    module: Any = kvpool.tiers.disk
    module.os = Os(**functions)
    try:
        yield
    finally:
        module.os = os


def workload(path: Path, tell: Callable[[str, list[int]], None], sync: str = "none") -> None:
    """Puts, reads, deletions and evictions; ``tell`` learns what is about to happen and what has.

    Records are numbered: prompt p, block i is 100 * p + i.
    """
    prompts = [records(8, 1000 * p) for p in range(5)]
    with DiskTier(path, SIZE, sync=sync) as tier:
        for p, items in enumerate(prompts):
            numbers = [100 * p + i for i in range(len(items))]
            tell("putting", numbers)
            assert tier.put(items) == [True] * len(items)
            tell("put", numbers)
            if p == 2:
                assert None not in tier.get([key for key, _ in prompts[0]])
            if p == 3:
                tell("deleting", [300, 301])
                tier.delete([key for key, _ in items[:2]])


def universe() -> dict[int, Key]:
    return {100 * p + i: key for p in range(5) for i, (key, _) in enumerate(records(8, 1000 * p))}


def killing(k: int, how: str) -> dict[str, Callable[..., Any]]:
    """The two calls that write, of which the k-th (from 0) is the last of this process."""
    count = 0

    def pwrite(fd: int, data: Any, at: int) -> int:
        nonlocal count
        count += 1
        if count <= k:
            return os.pwrite(fd, data, at)
        n = len(data) if how == "after" else random.Random(k).randrange(len(data))
        os.pwrite(fd, data[:n], at)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    return {"pwrite": pwrite, "pwritev": lambda fd, pieces, at: pwrite(fd, b"".join(pieces), at)}


def tell_pipe(pipe: int, what: str, which: list[int]) -> None:
    os.write(pipe, json.dumps([what, which]).encode() + b"\n")


def main(folder: Path) -> None:
    """Kills at every write; prints what was found as JSON."""
    numbers = universe()
    path = folder / "kv.slab"
    n_writes = n_images = n_right = 0
    for how in ("half", "after"):
        k = 0
        while True:
            path.unlink(missing_ok=True)
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                with replaced(**killing(k, how)):
                    workload(path, functools.partial(tell_pipe, write_end))
                os._exit(0)
            os.close(write_end)
            with os.fdopen(read_end) as pipe:
                told = [json.loads(line) for line in pipe]
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status == 0:
                break  # there is no k-th write
            assert status == -signal.SIGKILL, status
            k += 1
            n_images += 1
            with DiskTier(path, SIZE) as tier:
                there = {n for n, key in numbers.items() if tier.has([key])[0]}
                for n in there:  # not one entry without its record: the writer only was killed
                    [record] = tier.get([numbers[n]])
                    assert record is not None, (how, k, n)
                    assert is_right(numbers[n], record), (how, k, n)
                n_right += len(there)
                put = {n for what, which in told if what == "put" for n in which}
                gone = {n for what, which in told if what == "deleting" for n in which}
                evicted = tier.stats().n_records >= 20  # from then on the oldest have to go
                assert evicted or put - gone <= there, (how, k, put - gone - there)
                more = records(4, 9000)
                assert tier.put(more) == [True] * 4
                for key, _ in more:
                    [record] = tier.get([key])
                    assert is_right(key, record)
                assert path.stat().st_size == SIZE
        n_writes = k
    print(json.dumps({"writes": n_writes, "images": n_images, "right": n_right}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
