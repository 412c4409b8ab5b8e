"""Envelopes in files: whole or not at all when written, bounded when read."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.wire import EnvelopeFile, StreamReader, files, write_file
from kvpool.wire import session as wire_session
from pool_support import ENVELOPE

FORMATS = Path(__file__).resolve().parent.parent / "formats"
GOLDEN = sorted((FORMATS / "golden").glob("*.tlkv"))
ERRORS = sorted((FORMATS / "golden-errors").glob("*.tlkv"))
O_TMPFILE = hasattr(os, "O_TMPFILE")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden_files_are_verified(path: Path) -> None:
    with EnvelopeFile(path) as file:
        file.verify()
        assert file.seal is None
        blocks = list(StreamReader(file.stream()))
        hashes = [int(h) for some, _ in file.records() for h in some]
        assert hashes == [block.hash for block in blocks]
        for block in blocks:
            raw = bytearray(file.header.block_bytes)
            file.read_payload(block.index, 0, memoryview(raw))
    if blocks:
        assert raw == block.payload.tobytes()


@pytest.mark.parametrize("path", ERRORS, ids=lambda p: p.stem)
def test_a_file_is_refused_as_its_bytes_are(path: Path) -> None:
    data = path.read_bytes()
    wanted: str | None = None
    try:
        kvpool.wire.EnvelopeHeader.check(data)  # without a pool's shape
    except (kvpool.CorruptEnvelope, kvpool.ShapeMismatch) as error:
        wanted = str(error).split(": ", 1)[1]
    try:
        with EnvelopeFile(path) as file:
            file.verify()
    except (kvpool.CorruptEnvelope, kvpool.ShapeMismatch) as error:
        assert str(error).split(": ", 1)[1] == wanted
    else:
        assert wanted is None


def sparse(path: Path, size: int, *parts: tuple[int, bytes]) -> None:
    with open(path, "wb") as file:
        file.truncate(size)
        for at, data in parts:
            file.seek(at)
            file.write(data)


def header(n: int, *dims: int) -> bytes:
    return b"TLKV\1\0\1\0" + b"".join(x.to_bytes(4, "little") for x in (n, *dims))


def test_a_terabyte_of_nothing_is_judged_at_once(tmp_path: Path) -> None:
    path, started = tmp_path / "sparse", time.process_time()
    sparse(path, 1 << 40)
    with pytest.raises(kvpool.CorruptEnvelope, match=r"length 1099511627776, .* 32 \(rule 1\)"):
        EnvelopeFile(path)
    block = (1 << 39) - 16 - 12  # two blocks: 28 + 2 * (12 + P) + 4 = 2**40
    dims = (block // 4 // 34, 34, 1, 1)
    size = 32 + 2 * (12 + dims[0] * 34 * 4)
    sparse(path, size, (0, header(2, *dims)))
    with EnvelopeFile(path) as file:
        with pytest.raises(kvpool.CorruptEnvelope, match=r"CRC-32C 00000000 .* \(rule 3\)"):
            file.verify()
        _, crc = file.crc()
    sparse(path, size, (0, header(2, *dims)), (size - 4, crc.to_bytes(4, "little")))
    with (
        EnvelopeFile(path) as file,
        pytest.raises(kvpool.CorruptEnvelope, match=r"n_tokens 0 of block 0 .*rule 6"),
    ):
        file.verify()
    assert time.process_time() - started < 2


def test_four_billion_blocks_are_announced_and_not_there(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    path.write_bytes(header(0xFFFFFFFF, 16, 32, 8, 128) + bytes(1000))
    with pytest.raises(kvpool.CorruptEnvelope, match=r"length 1028, the header announces \d+"):
        EnvelopeFile(path)
    size = 32 + 0xFFFFFFFF * 16
    sparse(path, size, (0, header(0xFFFFFFFF, 1, 1, 1, 1)))
    started = time.process_time()
    with EnvelopeFile(path) as file, pytest.raises(kvpool.CorruptEnvelope, match="rule 3"):
        file.verify()
    assert time.process_time() - started < 2


def test_a_hole_is_as_good_as_its_zeros(tmp_path: Path) -> None:
    pool = kvpool.Pool(3, block_tokens=16, n_layers=8, n_kv_heads=8, head_dim=64)  # 256 KiB
    ids = pool.alloc(3)
    pool.slab[:] = 0
    pool.slab[1, 3] = 1.5
    pool.set_fill(ids, 16)
    data, path = pool.export(ids), tmp_path / "holes"
    sparse(path, len(data), *((i, data[i : i + 4096]) for i in range(0, len(data), 4096)
                              if any(data[i : i + 4096])))  # fmt: skip
    if os.stat(path).st_blocks * 512 >= len(data):
        pytest.skip("this file system has no holes")
    with EnvelopeFile(path) as file:
        file.verify(pool)
        assert file.crc() == (file.header.crc32c, file.header.crc32c)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, text in [
        (tmp_path / "nothing", "No such file or directory"),
        (tmp_path, "no regular file"),
        (tmp_path / "fifo", "no regular file"),
        ("/dev/zero", "no regular file"),
    ]:
        with pytest.raises(kvpool.StorageError, match=text):
            EnvelopeFile(path)


def test_a_file_cut_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    shutil.copy(FORMATS / "golden/hundred_blocks.tlkv", path)
    with EnvelopeFile(path) as file:
        os.truncate(path, 200)
        with pytest.raises(kvpool.CorruptEnvelope, match="ended at offset 200 while it was read"):
            file.verify()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    before = n_open()
    for path in [*ERRORS, *GOLDEN, tmp_path]:
        try:
            with EnvelopeFile(path) as file:
                file.verify()
        except kvpool.KvPoolError:
            pass
    write_file(tmp_path / "x", [b"x"])
    assert n_open() == before


# ---- writing ------------------------------------------------------------------------------------


@pytest.fixture(params=[O_TMPFILE, False] if O_TMPFILE else [False], ids=lambda x: f"tmpfile={x}")
def with_and_without_unnamed_files(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> bool:
    if not request.param and O_TMPFILE:
        monkeypatch.delattr(os, "O_TMPFILE")
    return bool(request.param)


@pytest.mark.usefixtures("with_and_without_unnamed_files")
def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    pieces = [b"ab", b"", bytearray(b"cd"), memoryview(np.arange(3000, dtype=np.uint16))]
    for n in (1, 2000):  # more pieces than one system call takes
        write_file(path, pieces * n)
        assert path.read_bytes() == b"".join(map(bytes, pieces)) * n
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("with_and_without_unnamed_files")
def test_no_space_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_file(path, [b"old"])
    writev = os.writev
    calls: list[int] = []

    def full(fd: int, buffers: list[memoryview]) -> int:
        calls.append(fd)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(fd, [buffers[0][:1]])

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(kvpool.StorageError, match="file: No space left on device"):
        write_file(path, [b"new", b"er"])
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])


def test_a_size_limit_of_the_system_is_told(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(kvpool.StorageError, match="File too large"):
            write_file(tmp_path / "file", [bytes(10000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "no/file", tmp_path / "file/file"):
        (tmp_path / "file").touch()
        with pytest.raises(kvpool.StorageError, match=r"No such file|Not a directory"):
            write_file(path, [b"x"])
    with pytest.raises(kvpool.StorageError):
        write_file(tmp_path, [b"x"])
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("with_and_without_unnamed_files")
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(kvpool.StorageError, match=f"{name}: it is there, and no regular file"):
            write_file(tmp_path / name, [b"x"])
    assert path.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


@pytest.mark.usefixtures("with_and_without_unnamed_files")
@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, b"bytes"])
def test_names_of_any_length_are_replaced(tmp_path: Path, name: str | bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    for data in (b"old", b"new"):
        write_file(path if isinstance(name, bytes) else os.fsdecode(path), [data])
        with open(path, "rb") as file:
            assert file.read() == data
    assert os.listdir(tmp_path) == [os.fsdecode(name)]


def test_pieces_are_written_however_little_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = bytearray()

    def dribble(fd: int, buffers: list[memoryview]) -> int:
        part = b"".join(buffers)[:7]
        written.extend(part)
        return len(part)

    monkeypatch.setattr(os, "writev", dribble)
    pieces = [b"x" * n for n in (1, 0, 5, 7, 8, 20, 3)]
    assert files.writev_all(0, pieces) == len(b"".join(pieces))
    assert written == b"".join(pieces)


# ---- a session ----------------------------------------------------------------------------------

SHAPE = {"block_tokens": 4, "n_layers": 2, "n_kv_heads": 1, "head_dim": 8}
TOKENS = [*range(100, 110), 7]  # two full blocks, a tail of two computed ones, and one to compute
ROOT = kvpool.namespace(model="a")


def session(path: Path, tokens: list[int] = TOKENS, root: int = ROOT, n: int = 10) -> np.ndarray:
    """Saves a sequence; its K and V as they lie in the blocks."""
    pool = kvpool.Pool(8, **SHAPE)
    pool.slab.reshape(-1)[:] = np.arange(pool.slab.size) % 2039
    with kvpool.BlockManager(pool).allocate(tokens, namespace=root) as seq:
        seq.commit(n)
        seq.save(path)
        return pool.slab[seq.blocks].copy()


@pytest.fixture
def manager() -> kvpool.BlockManager:
    return kvpool.BlockManager(kvpool.Pool(8, **SHAPE))


def test_a_session_comes_back(tmp_path: Path, manager: kvpool.BlockManager) -> None:
    path = tmp_path / "s"
    kv = session(path)
    with manager.load(path, TOKENS, namespace=ROOT) as seq:
        assert (seq.n_tokens, seq.n_computed, seq.n_cached) == (11, 10, 0)
        assert seq.namespace == ROOT
        assert seq.tokens.tolist() == TOKENS
        got = manager.pool.slab[seq.blocks]
        assert got[:2].tobytes() == kv[:2].tobytes()
        assert got[2, :, :, :, :2].tobytes() == kv[2, :, :, :, :2].tobytes()
        assert manager.can_allocate([*TOKENS[:8], 1], namespace=ROOT).n_cached == 8
        assert manager.can_allocate([*TOKENS[:8], 1]).n_cached == 0
        seq.append(8)
        seq.commit()
        manager.check()
        seq.save(path)  # and again, with what is registered in another pool
    assert manager.stats.prompt_tokens == 0  # nobody's prompt
    with manager.load(path, [*TOKENS, 8], namespace=ROOT) as seq:
        assert (seq.n_computed, seq.n_cached) == (12, 8)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 12])
def test_every_length_comes_back(tmp_path: Path, manager: kvpool.BlockManager, n: int) -> None:
    path = tmp_path / "s"
    tokens = list(range(50, 50 + n))
    kv = session(path, tokens, 0, n)
    for _ in range(2):  # the second time over what the first one left
        with manager.load(path, tokens) as seq:
            assert (seq.n_tokens, seq.n_computed) == (n, n)
            got = manager.pool.slab[seq.blocks]
            for i in range(len(got)):
                fill = min(4, n - 4 * i)
                assert got[i, :, :, :, :fill].tobytes() == kv[i, :, :, :, :fill].tobytes()
        manager.check()


def test_a_prefix_that_is_here_is_shared(tmp_path: Path, manager: kvpool.BlockManager) -> None:
    path = tmp_path / "s"
    kv = session(path, root=0)
    with manager.allocate([*TOKENS[:4], 1]) as held:
        manager.pool.slab[held.blocks[0]] = 9
        held.commit(4)
        with manager.load(path, TOKENS) as seq:
            assert seq.n_cached == 4
            assert seq.blocks[0] == held.blocks[0]
            assert manager.pool.slab[seq.blocks[1]].tobytes() == kv[1].tobytes()
        assert (manager.pool.slab[held.blocks[0]] == 9).all()  # shared blocks are not written


def state(manager: kvpool.BlockManager) -> object:
    pool = manager.pool
    ids = range(pool.n_blocks)
    return (
        pool.stats, pool.refs(ids).tolist(), pool.fill(ids).tolist(), pool.hash(ids).tolist(),
        pool.slab.tobytes(), manager.stats,
    )  # fmt: skip


def test_what_is_not_this_session_is_refused(tmp_path: Path, manager: kvpool.BlockManager) -> None:
    path = tmp_path / "s"
    session(path)
    data = path.read_bytes()
    with manager.allocate(range(20)) as seq:  # five of eight blocks stay cached
        seq.commit()
    before = state(manager)
    other = TOKENS.copy()
    other[0] += 1
    tail = TOKENS.copy()
    tail[9] += 1  # of a partial tail, which has no name
    for tokens, root, text in [
        (other, ROOT, r"load: tokens: other than the 10 of the file"),
        (tail, ROOT, r"load: tokens: other than the 10 of the file"),
        (TOKENS[:9], ROOT, r"load: tokens: expected at least the 10 of the file, found 9"),
        ([], ROOT, r"load: tokens: expected at least the 10 of the file, found 0"),
        (TOKENS, 0, rf"load: namespace: expected {ROOT:#x}, that of the file, found 0x0"),
        (TOKENS, kvpool.namespace(model="b"), "load: namespace: expected"),
    ]:
        with pytest.raises(kvpool.InvalidArgument, match=text):
            manager.load(path, tokens, namespace=root)
        assert state(manager) == before
    with pytest.raises(kvpool.ArgumentTypeError, match="tokens"):
        manager.load(path, ["1"], namespace=ROOT)
    with pytest.raises(kvpool.ArgumentTypeError, match="namespace"):
        manager.load(path, TOKENS, namespace="a")
    with pytest.raises(kvpool.StorageError, match="No such file"):
        manager.load(tmp_path / "no", TOKENS)
    shape = {**SHAPE, "n_layers": 3}
    wrong = kvpool.BlockManager(kvpool.Pool(8, **shape))
    with pytest.raises(kvpool.ShapeMismatch, match="n_layers 2 at offset 16, the pool has 3"):
        wrong.load(path, TOKENS, namespace=ROOT)
    small = kvpool.BlockManager(kvpool.Pool(2, **SHAPE))
    with pytest.raises(kvpool.PoolFull):
        small.load(path, TOKENS, namespace=ROOT)
    assert small.pool.stats == (2, 0, 0, 0)
    path.write_bytes(data[80:])
    with pytest.raises(kvpool.CorruptEnvelope, match="without a seal"):
        manager.load(path, TOKENS, namespace=ROOT)
    assert state(manager) == before


def test_no_byte_of_the_file_may_change(tmp_path: Path, manager: kvpool.BlockManager) -> None:
    path = tmp_path / "s"
    session(path)
    data = path.read_bytes()
    before = state(manager)
    for at in [*range(124), *range(124, len(data), 37), *range(len(data) - 4, len(data))]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises((kvpool.CorruptEnvelope, kvpool.InvalidArgument)):
            manager.load(path, TOKENS, namespace=ROOT)
    for end in [0, 1, 79, 80, 100, 112, len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(kvpool.CorruptEnvelope):
            manager.load(path, TOKENS, namespace=ROOT)
    assert state(manager) == before
    path.write_bytes(data)
    manager.load(path, TOKENS, namespace=ROOT).free()


def test_a_seal_is_of_one_envelope(tmp_path: Path, manager: kvpool.BlockManager) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    session(a)
    session(b, [3, *TOKENS[1:]])
    for mixed, text in [
        (a.read_bytes()[:80] + b.read_bytes()[80:-4] + a.read_bytes()[-4:], "CRC-32C"),
        (a.read_bytes()[:80] + ENVELOPE, "envelope_bytes"),
    ]:
        (tmp_path / "mixed").write_bytes(mixed)
        with pytest.raises(kvpool.CorruptEnvelope, match=text):
            manager.load(tmp_path / "mixed", TOKENS, namespace=ROOT)


def test_a_seal_over_other_blocks_is_told(tmp_path: Path, manager: kvpool.BlockManager) -> None:
    """Everything sealed and summed rightly, but the names are those of another prompt."""
    a, b = tmp_path / "a", tmp_path / "b"
    session(a)
    session(b, [*range(200, 210), 7])
    seal = kvpool.wire.Seal.unpack(a.read_bytes())
    other = b.read_bytes()[80:]
    forged = seal._replace(envelope_crc32c=int.from_bytes(other[-4:], "little"))
    (tmp_path / "mixed").write_bytes(forged.pack() + other)
    with pytest.raises(kvpool.CorruptEnvelope, match="block 0 is not that of its tokens"):
        manager.load(tmp_path / "mixed", TOKENS, namespace=ROOT)


def test_a_file_that_changes_between_the_readings_gives_everything_back(
    tmp_path: Path, manager: kvpool.BlockManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    session(path)
    fill = wire_session._fill

    def flip() -> None:
        with open(path, "r+b") as file:
            file.seek(200)
            file.write(b"\xff")

    for damage in (flip, lambda: os.truncate(path, 300)):

        def fill_later(*args: object, damage: Callable[[], None] = damage) -> None:
            damage()
            fill(*args)

        monkeypatch.setattr(wire_session, "_fill", fill_later)
        with pytest.raises(kvpool.StorageError, match="changed while it was read"):
            manager.load(path, TOKENS, namespace=ROOT)
        session(path)
    assert manager.pool.stats == (8, 0, 0, 0)
    assert manager.stats.n_seqs == 0
    assert manager.can_allocate(TOKENS, namespace=ROOT).n_cached == 0


def test_a_sequence_cut_into_a_shared_block_is_saved_cut(
    tmp_path: Path, manager: kvpool.BlockManager
) -> None:
    pool = manager.pool
    pool.slab.reshape(-1)[:] = np.arange(pool.slab.size) % 2039
    path = tmp_path / "s"
    with manager.allocate(range(8)) as seq:
        seq.commit()
        for n in (7, 5, 4, 3, 1):
            with seq.fork() as cut:
                cut.truncate(n)
                for chunk in (1, 400, 1 << 20):
                    assert b"".join(cut.export_iter(chunk)) == cut.export()
                cut.save(path)
                kv = pool.slab[seq.blocks]
            twin = kvpool.BlockManager(kvpool.Pool(4, **SHAPE))
            with twin.load(path, range(n)) as back:
                assert back.n_computed == n
                last = twin.pool.slab[back.blocks][-1]
                fill = (n - 1) % 4 + 1
                want = kv[(n - 1) // 4, :, :, :, :fill]
                assert last[:, :, :, :fill].tobytes() == want.tobytes()
                assert not last[:, :, :, fill:].any()


def test_parts_of_a_sequence_are_of_what_was_computed_then(manager: kvpool.BlockManager) -> None:
    seq = manager.allocate(range(10))
    seq.commit(9)
    want, parts = seq.export(), seq.export_iter(1)
    got = [next(parts)]
    seq.append([1, 2, 3])
    seq.commit()
    with seq.fork():
        seq.append(4)  # the last block is replaced by a copy
        got += parts
    assert b"".join(got) == want
    assert len(got) == 3
    for change, text in [
        (lambda: seq.truncate(8), "cut from 13 to 8 computed tokens"),
        (seq.free, "not a live|freed|no sequence"),
    ]:
        parts = seq.export_iter(1)
        next(parts)
        change()
        with pytest.raises(kvpool.InvalidArgument, match=text):
            next(parts)
        if not seq.is_freed:
            seq.append(range(5))
            seq.commit()
    with pytest.raises(kvpool.InvalidArgument, match="freed"):
        seq.export_iter()


def test_nothing_computed_is_nothing_to_save(tmp_path: Path, manager: kvpool.BlockManager) -> None:
    with manager.allocate([1, 2]) as seq:
        with pytest.raises(kvpool.InvalidArgument, match="nothing of the sequence is computed"):
            seq.save(tmp_path / "s")
    assert os.listdir(tmp_path) == []


WRITER = """
import sys
import numpy as np
import kvpool

path, tokens = sys.argv[1], range(64)
pool = kvpool.Pool(4, block_tokens=16, n_layers=16, n_kv_heads=8, head_dim=128)   # 1 MiB a block
seq = kvpool.BlockManager(pool).allocate(tokens)
print("ready", flush=True)
version = 0
while True:
    version += 1
    pool.slab[:] = version % 1000
    seq.commit()
    seq.save(path)
"""


def test_a_killed_writer_leaves_a_whole_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "session"
    pool = kvpool.Pool(4, block_tokens=16, n_layers=16, n_kv_heads=8, head_dim=128)
    manager = kvpool.BlockManager(pool, prefix_cache="none")
    rng = np.random.default_rng(7)
    seen: set[float] = set()
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == "ready\n"
            time.sleep(float(rng.uniform(0.0, 0.15)))
            child.send_signal(signal.SIGKILL)
            child.wait()
        left = os.listdir(tmp_path)
        assert left in ([], ["session"]), left
        if left:
            with manager.load(path, range(64)) as seq:
                values = np.unique(pool.slab[seq.blocks])
                assert len(values) == 1  # of one version
                seen.add(float(values[0]))
    assert seen
