"""Envelopes in files: read in bounded memory and time, written whole or not at all.

A file from elsewhere may be anything: cut, terabytes long with nothing in it, changed while it is
read, no file at all. So it is read with ``pread`` into buffers of one size, and not mapped (a
mapped file that is cut short ends the process). Holes are not read: the checksum of zeros is
computed. What is left to read is what the file takes on the disk.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool import CorruptEnvelope, StorageError, crc32c
from kvpool._core import EnvelopeHeader, crc32c_combine

from .envelope import HEADER_BYTES, RECORD_BYTES, TRAILER_BYTES, Shape
from .seal import SEAL_BYTES, SEAL_MAGIC, Seal

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

    Path = str | os.PathLike[str]

__all__ = ["EnvelopeFile", "new_file", "write_file", "writev_all"]

_CHUNK = 1 << 20
_IOV = 16  # pieces a system call: with hundreds of large ones it is measured to be slower


class EnvelopeFile:
    """A file that holds an envelope, sealed or not: its header now, the rest when it is asked for.

    Opening reads the first bytes and holds them to rules 1 and 2 (and the seal, if there is one, to
    its own); ``verify`` does the rest. A context manager. It reads into one buffer: one thread at a
    time.

    Raises:
        CorruptEnvelope: the beginning is no envelope's.
        StorageError: the file cannot be read, or is no regular file.

    >>> import os, tempfile
    >>> import kvpool
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> ids = pool.alloc(2)
    >>> pool.set_fill(ids, [2, 1])
    >>> path = os.path.join(tempfile.mkdtemp(), "two.tlkv")
    >>> write_file(path, pool.export_pieces(ids))
    >>> with EnvelopeFile(path) as file:
    ...     file.verify(pool)
    ...     file.header.n_blocks, [n.tolist() for _, n in file.records()]
    (2, [[2, 1]])
    """

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self._buffer = memoryview(bytearray(_CHUNK))
        with storage_errors(self.path):
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would wait for its writer
            self._fd = os.open(self.path, flags)
        try:
            with storage_errors(self.path):
                info = os.fstat(self._fd)
                if not stat.S_ISREG(info.st_mode):
                    raise StorageError(f"{self.path}: no regular file")
                self._is_sparse = info.st_blocks * 512 < info.st_size
            self.seal: Seal | None = None
            """The seal before the envelope, or None."""
            self._start = 0
            size = info.st_size
            start = bytes(self._read(0, min(size, SEAL_BYTES + HEADER_BYTES)))
            if start[:4] == SEAL_MAGIC:
                self.seal = Seal.unpack(start)
                self._start = SEAL_BYTES
            self.header = EnvelopeHeader(start[self._start :], size - self._start)
            """The envelope's header."""
            if self.seal is not None and self.seal.envelope_bytes != self.header.size_bytes:
                raise CorruptEnvelope(
                    f"seal: envelope_bytes {self.seal.envelope_bytes} at offset 64, the envelope "
                    f"has {self.header.size_bytes}"
                )
        except BaseException:
            os.close(self._fd)
            raise

    def _read(self, at: int, n: int) -> memoryview:
        """n bytes at an offset in the file, in the one buffer: valid until the next call."""
        view = self._buffer[:n]
        self._read_into(at, view)
        return view

    def _read_into(self, at: int, view: memoryview) -> None:
        done = 0
        with storage_errors(self.path):
            while done < len(view):
                n = os.preadv(self._fd, [view[done:]], at + done)
                if n == 0:
                    raise CorruptEnvelope(
                        f"{self.path}: ended at offset {at + done} while it was read (rule 1)"
                    )
                done += n

    def crc(self) -> tuple[int, int]:
        """The checksum that is stored, and that of the bytes."""
        end = self._start + self.header.size_bytes - TRAILER_BYTES
        crc, at = 0, self._start
        while at < end:
            data, hole = self._extent(at, end)
            if data > at:
                crc = crc32c_combine(crc, _crc_of_zeros(data - at), data - at)
            for at in range(data, hole, _CHUNK):
                crc = crc32c(self._read(at, min(_CHUNK, hole - at)), crc)
            at = hole
        return self.stored_crc(), crc

    def stored_crc(self) -> int:
        """The checksum that is stored."""
        end = self._start + self.header.size_bytes - TRAILER_BYTES
        return int.from_bytes(self._read(end, TRAILER_BYTES), "little")

    def _extent(self, at: int, end: int) -> tuple[int, int]:
        """Where the next bytes that are not a hole begin and end, at or after ``at``."""
        if not self._is_sparse:
            return at, end
        try:
            data = min(os.lseek(self._fd, at, os.SEEK_DATA), end)
            return data, min(os.lseek(self._fd, data, os.SEEK_HOLE), end) if data < end else end
        except OSError as error:  # only a hole is left; or nobody knows about holes here
            return (end if error.errno == errno.ENXIO else at), end

    def verify(self, shape: Shape = None) -> None:
        """The rest of the reader rules, in their order: the checksum, the header, each block.

        Also that a seal is of this envelope. Memory is bounded by a buffer of 1 MiB, time by what
        the file takes on the disk. Raises CorruptEnvelope, ShapeMismatch, StorageError.
        """
        self.header.check_crc(*self.crc())
        self.header.accept(shape)
        for _ in self.records():
            pass
        if self.seal is not None and self.seal.envelope_crc32c != self.header.crc32c:
            raise CorruptEnvelope(
                f"seal: envelope_crc32c {self.seal.envelope_crc32c:08x} at offset 72, the envelope "
                f"has {self.header.crc32c:08x}"
            )

    def records(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32]]]:
        """Hashes and n_tokens of the blocks, some at a time, checked by rule 6."""
        header, i = self.header, 0
        record = RECORD_BYTES + header.block_bytes
        # Small records are read with their payloads, of large ones only the 12 bytes.
        step = max(1, _CHUNK // record) if record <= 1 << 16 else 1
        while i < header.n_blocks:
            count = min(step, header.n_blocks - i)
            at = self._start + HEADER_BYTES + i * record
            data = self._read(at, (count - 1) * record + RECORD_BYTES)
            header.check_records(i, count, data, record)
            yield (
                np.ndarray((count,), "<u8", data, 0, (record,)).copy(),
                np.ndarray((count,), "<u4", data, 8, (record,)).copy(),
            )
            i += count

    def read_payload(self, index: int, offset: int, view: memoryview) -> bool:
        """Fills ``view`` with the bytes of block ``index``'s payload from ``offset`` on.

        False, and the view is left alone, where all of them are in a hole: they are zeros.
        """
        record = RECORD_BYTES + self.header.block_bytes
        return self.read(HEADER_BYTES + index * record + RECORD_BYTES + offset, view)

    def next_data(self, offset: int) -> int:
        """The first byte of the envelope at or after ``offset`` that is not in a hole."""
        end = self._start + self.header.size_bytes
        return self._extent(self._start + offset, end)[0] - self._start

    def read(self, offset: int, view: memoryview) -> bool:
        """The same for the envelope's bytes from ``offset`` on."""
        at = self._start + offset
        if self._extent(at, at + len(view))[0] >= at + len(view):
            return False
        self._read_into(at, view)
        return True

    def stream(self) -> Any:
        """The envelope's bytes from its beginning, as a source for ``StreamReader``."""
        return _Source(self)

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Source:
    """Reads ahead a little, so that a small record does not cost a system call."""

    def __init__(self, file: EnvelopeFile) -> None:
        self._file, self._at = file, file._start
        self._end = self._at + file.header.size_bytes
        self._ahead = memoryview(b"")
        self._own = memoryview(bytearray(1 << 16))

    def readinto(self, view: memoryview) -> int:
        if not self._ahead:
            if len(view) >= len(self._own):
                n = min(len(view), self._end - self._at)
                self._file._read_into(self._at, view[:n])
                self._at += n
                return n
            self._ahead = self._own[: min(len(self._own), self._end - self._at)]
            self._file._read_into(self._at, self._ahead)
            self._at += len(self._ahead)
        n = min(len(view), len(self._ahead))
        view[:n] = self._ahead[:n]
        self._ahead = self._ahead[n:]
        return n


def _crc_of_zeros(n: int) -> int:
    """The CRC-32C of n zero bytes, from those of 1, 2, 4, ... of them."""
    crc, power, length = 0, crc32c(b"\0"), 1
    while n:
        if n & 1:
            crc = crc32c_combine(crc, power, length)
        power, length, n = crc32c_combine(power, power, length), 2 * length, n >> 1
    return crc


class storage_errors:
    """An OSError becomes a StorageError that names the file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        error = exc_info[1]
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"{self._path}: {error.strerror or error}") from error


# ---- writing ------------------------------------------------------------------------------------


def writev_all(fd: int, pieces: Sequence[Buffer]) -> int:
    """Writes the pieces at the file's position, however many system calls it takes; their bytes."""
    views = [view for piece in pieces if len(view := memoryview(piece).cast("B"))]
    total, first = 0, 0
    while first < len(views):
        n = os.writev(fd, views[first : first + _IOV])
        total += n
        while first < len(views) and n >= len(views[first]):
            n -= len(views[first])
            first += 1
        if n:
            views[first] = views[first][n:]
    return total


def write_file(path: Path, pieces: Sequence[Buffer]) -> None:
    """Writes a file from pieces, whole or not at all, as ``new_file`` does.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "file")
    >>> write_file(path, [b"TL", b"KV"])
    >>> os.listdir(os.path.dirname(path)), open(path, "rb").read()
    (['file'], b'TLKV')
    """
    with new_file(path) as fd:
        writev_all(fd, pieces)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A descriptor to write a file with that takes the name ``path`` at the end of the block.

    The bytes go to a file without a name in the same folder. At the end they are synced, and the
    file takes its name; a file that was there before is replaced. Whoever looks at ``path`` finds
    the old file or the new one, and after a crash of the process or of the machine too; a writer
    that fails or is killed leaves nothing else behind. (On file systems that have no files without
    a name, like NFS, it is ``.name.XXXX.tmp``, and a killed writer leaves that.)

    Raises:
        StorageError: no folder, no permission, no space, or something else than a file has the
            name, like a device; what was at ``path`` is still there.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "file")
    >>> with new_file(path) as fd:
    ...     os.write(fd, b"TLKV"), os.path.exists(path)
    (4, False)
    >>> os.path.exists(path)
    True
    """
    path = os.fspath(path)
    folder, name = os.path.split(path)
    with storage_errors(path):
        folder_fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _refuse_devices(folder_fd, name)
            with _unnamed_file(folder_fd, name) as fd:
                yield fd
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)


def _refuse_devices(folder_fd: int, name: str) -> None:
    """A rename would put the file in the place of a device, a pipe or a socket, for good."""
    try:
        mode = os.stat(name, dir_fd=folder_fd).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is there, and no regular file")


@contextmanager
def _unnamed_file(folder_fd: int, name: str) -> Iterator[int]:
    stem = os.fsdecode(os.fsencode(name)[: 255 - 14])  # a name has 255 bytes at most
    temporary = f".{stem}.{secrets.token_hex(4)}.tmp"
    fd, is_named = _open_unnamed(folder_fd), False
    if fd < 0:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd, is_named = os.open(temporary, flags, 0o666, dir_fd=folder_fd), True
    try:
        try:
            yield fd
            os.fsync(fd)
            if not is_named and _link(fd, folder_fd, name):
                return
            if not is_named:
                is_named = _link(fd, folder_fd, temporary)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        if is_named:
            os.unlink(temporary, dir_fd=folder_fd)
        raise


def _open_unnamed(folder_fd: int) -> int:
    """A file without a name, or -1 where there are none."""
    flags = getattr(os, "O_TMPFILE", 0)
    try:
        return os.open(".", flags | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=folder_fd)
    except OSError:  # the file system has none; without the flag it is a folder that is opened
        return -1


def _link(fd: int, folder_fd: int, name: str) -> bool:
    """Gives the file a name; False when somebody has it."""
    try:
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder_fd)
    except FileExistsError:
        return False
    return True
