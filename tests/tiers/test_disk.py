"""The disk tier: kept over restarts, never above its size, and right after every kind of damage."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_support import LAYOUT, SIZE, is_right, records, replaced, universe, workload
from tier_support import Engine

import kvpool
from kvpool.tiers import open_tier
from kvpool.tiers.disk import DiskTier

HERE = Path(__file__).parent
PROMPT = list(range(1, 19))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def right(tier: DiskTier, items: Any) -> list[bool]:
    """Which of the records come back right; one that is wrong and passes raises."""
    found = tier.get([key for key, _ in items])
    return [r is not None and is_right(k, r) for (k, _), r in zip(items, found, strict=True)]


# ---- what it keeps -------------------------------------------------------------------------------


def test_records_come_back_also_after_a_restart(path: Path) -> None:
    items = records(5)
    with DiskTier(path, SIZE) as tier:
        assert tier.get([items[0][0]]) == [None]
        assert tier.put(items) == [True] * 5
        assert tier.put(items[:1]) == [True]
        assert right(tier, items) == [True] * 5
        assert tier.stats().n_records == 5
        assert tier.delete([items[1][0], records(1, 50)[0][0]]) == [True, False]
        assert tier.has([items[0][0], items[1][0]]) == [True, False]
    with DiskTier(path) as tier:
        assert right(tier, items) == [True, False, True, True, True]
        assert sorted(tier.keys()) == sorted(key for key, _ in [items[0], *items[2:]])
        out = [memoryview(bytearray(LAYOUT.record_bytes + 10)) for _ in items]
        got = tier.get([key for key, _ in items], out)
        assert got[0].obj is out[0].obj  # read in place
        assert bytes(got[0]) == items[0][1]
        short = tier.get([items[0][0]], [memoryview(bytearray(3))])
        assert bytes(short[0]) == items[0][1]


def test_the_file_never_grows_and_the_least_recently_used_goes_first(path: Path) -> None:
    with DiskTier(path, SIZE) as tier:
        n = None
        for p in range(9):
            tier.put(records(8, 1000 * p))
            assert tier.has([records(1)[0][0]]) == [True]
            assert right(tier, records(1)) == [True]  # and so used
            n = tier.stats().n_records
        assert n == tier.stats().capacity_bytes // 4096
        assert tier.stats().size_bytes <= SIZE
        assert tier.stats().counts["evicted"] == 72 - n
        assert right(tier, records(8, 8000)) == [True] * 8
        # of the prompt that is half gone, the beginning is what is left
        half = next(
            flags for p in range(1, 9) if any(flags := right(tier, records(8, 1000 * p)))
            and not all(flags)
        )  # fmt: skip
        assert half == sorted(half, reverse=True)
    assert path.stat().st_size == SIZE


def test_what_was_used_last_is_known_after_a_restart(path: Path) -> None:
    with DiskTier(path, SIZE) as tier:
        for p in range(3):
            tier.put(records(8, 1000 * p))
        right(tier, records(8, 0))
    with DiskTier(path) as tier:
        tier.put(records(8, 5000))
        n_gone = 8 - (tier.stats().capacity_bytes // 4096 - 24)
        held = tier.has([key for key, _ in records(8, 1000)])
        assert held == [True] * (8 - n_gone) + [False] * n_gone  # the end of it
        tier.put(records(4, 6000))
        assert right(tier, records(8, 0)) == [True] * 8
        assert not any(right(tier, records(8, 1000)))


def test_hints_are_written_now_and_then_without_a_close(path: Path) -> None:
    with DiskTier(path, SIZE) as tier:
        for p in range(3):
            tier.put(records(8, 1000 * p))
        for _ in range(140):
            right(tier, records(8, 0))
        copy = path.with_name("copy")
        shutil.copy(path, copy)
    with DiskTier(copy) as tier:
        tier.put(records(12, 5000))
        assert right(tier, records(8, 0)) == [True] * 8


def test_a_slot_that_is_being_read_is_not_written_over(path: Path) -> None:
    with DiskTier(path, SIZE) as tier:
        items = records(8)
        tier.put(items)
        reading, go_on = threading.Event(), threading.Event()

        def preadv(fd: int, views: Any, at: int) -> int:
            reading.set()
            go_on.wait(10)
            return os.preadv(fd, views, at)

        found: list[bool] = []
        with replaced(preadv=preadv):
            reader = threading.Thread(target=lambda: found.extend(right(tier, items)))
            reader.start()
            reading.wait(10)
            for p in range(1, 9):
                tier.put(records(8, 1000 * p))
            tier.delete([items[0][0]])
            go_on.set()
            reader.join()
        assert found == [True] * 8
        assert right(tier, items) == [False] + [True] * 7
        n = tier.stats().capacity_bytes // 4096
        for p in range(1, 9):
            tier.put(records(8, 1000 * p))
        assert tier.stats().n_records == n  # the slot of the deleted one is used again


def test_a_close_during_a_put_waits_for_its_end(path: Path) -> None:
    tier = DiskTier(path, SIZE)
    writing, go_on = threading.Event(), threading.Event()

    def pwritev(fd: int, pieces: Any, at: int) -> int:
        writing.set()
        go_on.wait(10)
        return os.pwritev(fd, pieces, at)

    with replaced(pwritev=pwritev):
        writer = threading.Thread(target=lambda: tier.put(records(2)))
        writer.start()
        writing.wait(10)
        tier.close()
        assert tier._fd >= 0
        go_on.set()
        writer.join()
    assert tier._fd == -1
    tier.close()
    with pytest.raises(kvpool.StorageError, match="closed"):
        tier.put(records(1))
    with DiskTier(path) as tier:
        assert right(tier, records(2)) == [True, True]


# ---- options, and files that are not right -------------------------------------------------------


def test_urls(tmp_path: Path) -> None:
    with open_tier(f"disk:{tmp_path}/a%20b?size=1MiB&sync=data") as tier:
        assert tier.name == f"disk:{tmp_path}/a b"
        assert tier.stats().capacity_bytes == 1 << 20
    with open_tier(f"disk:{tmp_path}?size=1MiB"):
        assert (tmp_path / "kvpool.slab").stat().st_size == 1 << 20
    for url, text in (
        ("disk:", "expected a path"),
        ("disk:/tmp/a%00b", "which has a zero byte"),
        ("disk://host/path", "expected disk:/path"),
        (f"disk:{tmp_path}/x?size=ten", "size: expected a size"),
        (f"disk:{tmp_path}/x?size=10", "size: expected at least 65536, found 10"),
        (f"disk:{tmp_path}/x?sync=always", "sync: expected none or data"),
        (f"disk:{tmp_path}/x?sizes=1", "unknown option sizes"),
        (f"disk:{tmp_path}/a%20b?size=2MiB", "has size 1048576, expected 2097152"),
    ):
        with pytest.raises(kvpool.InvalidArgument, match=text):
            open_tier(url)
    with pytest.raises(kvpool.StorageError, match="nowhere/x: No such file or directory"):
        open_tier(f"disk:{tmp_path}/nowhere/x?size=1MiB")


def test_one_process_at_a_time(path: Path) -> None:
    with DiskTier(path, SIZE) as tier:
        tier.put(records(2))
        code = (
            "import sys, kvpool\nfrom kvpool.tiers.disk import DiskTier\n"
            "try: DiskTier(sys.argv[1])\nexcept kvpool.Busy as error: print(error)"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
        )
        assert f"process {os.getpid()} has it; one at a time" in other.stdout
        with pytest.raises(kvpool.Busy):
            DiskTier(path)
        assert right(tier, records(2)) == [True, True]
    DiskTier(path).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_fork_has_neither_the_file_nor_its_lock(path: Path) -> None:
    tier = DiskTier(path, SIZE)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)  # so that it ends with its parent, whatever happens there
        try:
            tier.put(records(1))
            code = 1
        except kvpool.StorageError:
            code = 0
        tier.close()
        os.read(read_end, 1)  # lives on while the parent closes
        os._exit(code)
    tier.put(records(2))
    tier.close()
    with DiskTier(path) as tier:  # though the child lives
        assert right(tier, records(2)) == [True, True]
    os.write(write_end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(read_end)
    os.close(write_end)


def test_a_file_of_somebody_else_is_left_as_it_is(path: Path) -> None:
    path.write_bytes(b"my thesis" * 1000)
    with pytest.raises(kvpool.InvalidArgument, match="not a file of this tier"):
        DiskTier(path, SIZE)
    assert path.read_bytes() == b"my thesis" * 1000
    os.mkfifo(fifo := path.with_name("fifo"))
    with pytest.raises(kvpool.InvalidArgument, match="no regular file"):
        DiskTier(fifo, SIZE)


@pytest.mark.parametrize("what", ["version", "damaged", "short"])
def test_another_version_or_a_damaged_head_begins_anew_and_is_told(
    path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with DiskTier(path, SIZE) as tier:
        tier.put(records(3))
    data = bytearray(path.read_bytes())
    if what == "version":
        data[4:8] = (2).to_bytes(4, "little")
    elif what == "damaged":
        data[20] ^= 1
    path.write_bytes(data[:20] if what == "short" else data)
    with caplog.at_level(logging.WARNING), DiskTier(path, SIZE) as tier:
        assert "begun anew" in caplog.text
        assert tier.stats().counts["begun_anew"] == 1
        assert right(tier, records(3)) == [False] * 3
        assert tier.put(records(3)) == [True] * 3
        assert right(tier, records(3)) == [True] * 3


@pytest.mark.parametrize("what", ["version", "damaged", "empty"])
def test_who_only_looks_leaves_a_file_as_it_is(path: Path, what: str) -> None:
    with DiskTier(path, SIZE) as tier:
        tier.put(records(3))
    data = bytearray(path.read_bytes())
    data[4 if what == "version" else 20] ^= 3
    path.write_bytes(b"" if what == "empty" else data)
    before = path.read_bytes()
    with pytest.raises(kvpool.StorageError, match="nothing in it can be used; it is left"):
        open_tier(f"disk:{path}", create=False)
    assert path.read_bytes() == before


def test_records_much_shorter_than_a_slot_are_kept_all_the_same(path: Path) -> None:
    """A file made for a large model, then used for a small one: many to a write."""
    key, record = records(1, 77)[0]
    with DiskTier(path, 1 << 20) as tier:
        tier.expect(2 * 4096)
        assert tier.put([(key, record)]) == [True]
        assert tier.put(records(6)) == [True] * 6
        assert right(tier, records(6)) == [True] * 6
        assert right(tier, [(key, record)]) == [True]
    with DiskTier(path) as tier:
        assert right(tier, records(6)) == [True] * 6


def test_records_of_another_size(path: Path) -> None:
    with DiskTier(path, SIZE) as tier:
        tier.put(records(1))
        key, record = records(1, 77)[0]
        assert tier.put([(key, record * 10)]) == [False]
        assert tier.stats().counts["too_large"] == 1
        tier.expect(4096)
        with pytest.raises(kvpool.InvalidArgument, match="records of up to 4096 bytes, these have"):
            tier.expect(4097)
    pool = kvpool.Pool(4, 16, n_layers=4, n_kv_heads=4, head_dim=64)
    with pytest.raises(kvpool.InvalidArgument, match="records of up to 4096 bytes"):
        kvpool.BlockManager(pool, tiers=[f"disk:{path}"])
    kvpool.BlockManager(pool).close()
    with DiskTier(path) as tier:  # it was closed, and is as it was
        assert right(tier, records(1)) == [True]
    with pytest.raises(kvpool.InvalidArgument, match="has no room for one record"):
        DiskTier(path.with_name("small"), 1 << 16).expect(1 << 20)


# ---- damage --------------------------------------------------------------------------------------


def test_bit_rot_anywhere_in_the_file_is_a_miss_or_nothing(path: Path) -> None:
    items = records(6)
    with DiskTier(path, 1 << 16) as tier:
        tier.put(items)
    good = path.read_bytes()
    rng = random.Random(1)
    n_lost = n_entries = 0
    for _ in range(250):
        data = bytearray(good)
        at = rng.randrange(len(data)) if rng.random() < 0.3 else rng.randrange(4096, 8192 + 40_000)
        data[at % len(data)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with DiskTier(path) as tier:
            flags = right(tier, items)
            assert flags.count(False) <= (6 if at < 4096 else 1)
            n_lost += flags.count(False)
            n_entries += tier.stats().counts.get("bad_entries", 0)
            assert sorted(tier.keys()) == sorted(set(tier.keys()) & {key for key, _ in items})
            assert tier.put(records(1, 500)) == [True]
            assert right(tier, records(1, 500)) == [True]
    assert n_lost > 8
    assert n_entries > 3


def test_an_engine_over_rotten_disks_computes_what_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with Engine([f"disk:{path}?size=1MiB"]) as engine:
        assert engine.answer(PROMPT) == 0
        engine.close()
    with Engine([f"disk:{path}"]) as engine:
        assert engine.answer(PROMPT) == 16
        key = engine.tiers.layout.keys(PROMPT)[2]
        tier = engine.tiers._tiers[0]
        at = tier._slot_at(tier._index[kvpool.tiers.disk._KEY.pack(*key)])
        with path.open("r+b") as file:
            file.seek(at + 200)
            file.write(b"rot")
        engine.forget()
        assert engine.answer(PROMPT) == 8
        assert engine.stats.refused == {"envelope": 1}
        engine.flush()
        engine.forget()
        assert engine.answer(PROMPT) == 16  # it was written again
        engine.close()


@pytest.mark.parametrize("n", [0, 100, 4096, 5000, 8192, 12288, 20_000, SIZE - 1])
def test_a_truncated_file(path: Path, n: int, caplog: pytest.LogCaptureFixture) -> None:
    items = records(20)
    with DiskTier(path, SIZE) as tier:
        tier.put(items)
    os.truncate(path, n)
    with DiskTier(path, SIZE) as tier:
        flags = right(tier, items)
        assert not all(flags) or n == SIZE - 1
        assert tier.put(items) == [True] * 20
        assert right(tier, items) == [True] * 20
        assert path.stat().st_size == SIZE
    assert n in (0,) or caplog.text


def test_a_file_that_is_cut_while_it_is_open(path: Path) -> None:
    items = records(20)
    with DiskTier(path, SIZE) as tier:
        tier.put(items)
        os.truncate(path, 40_000)
        flags = right(tier, items)
        assert any(flags)
        assert not all(flags)
        assert tier.stats().counts["cut_off"] == flags.count(False)
        assert tier.has([key for key, _ in items]) == flags
        assert tier.put(items) == [True] * 20
        assert right(tier, items) == [True] * 20


def test_a_sector_that_cannot_be_read_is_one_miss(path: Path) -> None:
    items = records(4)
    with DiskTier(path, SIZE) as tier:
        tier.put(items)
        bad = tier._slot_at(tier._index[kvpool.tiers.disk._KEY.pack(*items[2][0])])

        def preadv(fd: int, views: Any, at: int) -> int:
            if at <= bad < at + sum(map(len, views)):
                raise OSError(errno.EIO, "Input/output error")
            return os.preadv(fd, views, at)

        with replaced(preadv=preadv):
            assert right(tier, items) == [True, True, False, True]
        assert tier.stats().counts["unreadable"] == 1


def test_a_full_disk_is_told_and_what_was_there_stays(path: Path) -> None:
    left = 1

    def pwritev(fd: int, pieces: Any, at: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwritev(fd, pieces, at)

    with DiskTier(path, SIZE) as tier:
        with replaced(pwritev=pwritev):
            assert tier.put(records(3)) == [True] * 3
            with pytest.raises(kvpool.StorageError, match=r"kv\.slab: No space left on device"):
                tier.put(records(4, 400))
        assert right(tier, records(3)) == [True] * 3
        assert tier.stats().n_records == 3
        assert len(tier._free) == tier._shape.n_slots - 3
        assert tier.put(records(4, 400)) == [True] * 4

    with Engine([f"disk:{path.with_name('e')}?size=1MiB"]) as engine:
        left = 0
        with replaced(pwritev=pwritev):
            assert engine.answer(PROMPT) == 0
            engine.flush()
            engine.forget()
            assert engine.answer(PROMPT) == 0
        assert "No space left" in engine.stats.last_error
        assert engine.stats.dropped == 8
        engine.close()


NAMESPACE = ["unshare", "--map-root-user", "--mount"]


def in_a_small_file_system(folder: Path, options: str, script: str, remount: str = "") -> str:
    """Runs Python with its working folder in a tmpfs of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    command = f'mount -t tmpfs -o {options} none "$0" && cd "$0" && '
    run = 'exec "$1" -c "$2"'
    if remount:
        first, run = script.split("# --- remount\n")
        command += f'"$1" -c "$3" && mount -o remount,{remount} "$0" && '
        args = [sys.executable, run_script(run), run_script(first)]
        run = 'exec "$1" -c "$2"'
    else:
        args = [sys.executable, run_script(script)]
    result = subprocess.run(
        [*NAMESPACE, "sh", "-c", command + run, str(folder), *args],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"no mounts here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_script(text: str) -> str:
    return f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + text


def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    script = """
import kvpool
from kvpool.tiers.disk import DiskTier
try:
    DiskTier("kv.slab", 8 << 20)
except kvpool.StorageError as error:
    print(error)
import os
print(os.stat("kv.slab").st_size)
"""
    out = in_a_small_file_system(tmp_path, "size=2m", script).splitlines()
    assert out == ["disk:kv.slab: No space left on device", "0"]


def test_a_file_system_that_is_really_read_only(tmp_path: Path) -> None:
    script = """
from disk_support import SIZE, records
from kvpool.tiers.disk import DiskTier
with DiskTier("kv.slab", SIZE) as tier:
    tier.put(records(3))
# --- remount
from disk_support import SIZE, is_right, records
from tier_support import Engine
from kvpool.tiers.disk import DiskTier
with DiskTier("kv.slab", SIZE) as tier:
    print(tier.is_read_only, tier.put(records(1)), tier.put(records(1, 50)))
    print([is_right(k, tier.get([k])[0]) for k, _ in records(3)], tier.delete([records(1)[0][0]]))
    print(dict(tier.stats().counts))
with Engine(["disk:kv.slab"]) as engine:
    print(engine.answer(range(1, 19)), engine.answer(range(1, 19)))
    engine.flush()
    print(engine.stats.not_stored, engine.stats.stored)
    engine.close()
"""
    out = in_a_small_file_system(tmp_path, "size=4m", script, remount="ro").splitlines()
    assert out == [
        "True [False] [False]",
        "[True, True, True] [True]",
        "{'read_only': 2}",
        "0 16",
        "4 0",
    ]


# ---- crashes -------------------------------------------------------------------------------------


def test_a_writer_killed_at_any_write_leaves_only_right_records(tmp_path: Path) -> None:
    """SIGKILL in the middle of and after every single write of a workload."""
    result = subprocess.run(
        [sys.executable, HERE / "disk_support.py", tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert found["writes"] > 15
    assert found["images"] == 2 * found["writes"]
    assert found["right"] > 10 * found["writes"]


SECTOR = 512


class Disk:
    """Records what is written to one file, and gives what may be on the disk after a power cut."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, bytes]] = []  # write, sync, mark

    def pwrite(self, fd: int, data: Any, at: int) -> int:
        self.events.append(("write", at, bytes(data)))
        return os.pwrite(fd, data, at)

    def pwritev(self, fd: int, pieces: Any, at: int) -> int:
        return self.pwrite(fd, b"".join(pieces), at)

    def fdatasync(self, fd: int) -> None:
        self.events.append(("sync", 0, b""))

    def tell(self, what: str, which: list[int]) -> None:
        self.events.append((what, 0, json.dumps(which).encode()))

    def image(self, n_events: int, rng: random.Random) -> bytes:
        """After so many events: what was synced is there; of every sector that was written since,
        any of its versions may be. That covers lost, reordered and torn writes."""
        synced = max((i for i in range(n_events) if self.events[i][0] == "sync"), default=-1)
        image = bytearray(SIZE)
        versions: dict[int, list[bytes]] = {}
        latest = bytearray(SIZE)
        mood = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for i, (what, at, data) in enumerate(self.events[:n_events]):
            if what != "write":
                continue
            latest[at : at + len(data)] = data
            if i <= synced:
                image[at : at + len(data)] = data
                continue
            for sector in range(at // SECTOR, -(-(at + len(data)) // SECTOR)):
                start = sector * SECTOR
                versions.setdefault(sector, []).append(bytes(latest[start : start + SECTOR]))
        for sector, seen in versions.items():
            if rng.random() < mood:
                image[sector * SECTOR : (sector + 1) * SECTOR] = rng.choice(seen)
        return bytes(image)


@pytest.mark.parametrize("sync", ["none", "data"])
def test_a_power_cut_at_any_time_leaves_right_records_and_misses(path: Path, sync: str) -> None:
    disk, numbers = Disk(), universe()
    with replaced(pwrite=disk.pwrite, pwritev=disk.pwritev, fdatasync=disk.fdatasync):
        workload(path, disk.tell, sync)
    rng = random.Random(sync)
    n_right = n_wrong = 0
    copy = path.with_name("copy")
    for _ in range(150):
        n = rng.randrange(1, len(disk.events) + 1)
        copy.write_bytes(disk.image(n, rng))
        told = [(what, json.loads(data)) for what, _, data in disk.events[:n] if data[:1] == b"["]
        put = {k for what, which in told if what == "put" for k in which}
        gone = {k for what, which in told if what == "deleting" for k in which}
        started = {k for what, which in told if what == "putting" for k in which}
        with DiskTier(copy, SIZE) as tier:
            there = set()
            for k, key in numbers.items():
                [record] = tier.get([key])
                if record is not None:
                    if is_right(key, record):  # raises for one that is wrong and passes
                        there.add(k)
                    else:
                        n_wrong += 1
                        assert sync == "none" or len(started) > 24  # only where slots were reused
            n_right += len(there)
            assert there <= started
            if sync == "data" and len(started) <= 24:  # nothing was evicted yet
                assert put - gone <= there
            assert tier.put(records(3, 9000)) == [True] * 3
            assert right(tier, records(3, 9000)) == [True] * 3
    assert n_right > 200
    assert n_wrong > 0  # entries without their record do come up
