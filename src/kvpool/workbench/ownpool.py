"""A kv_pool.c as a shared library, with as much of :class:`kvpool.Pool` as a paged cache uses."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool._stats import Stats
from kvpool.errors import BY_STATUS, KvPoolError

__all__ = ["OwnPool", "open_library"]


class _Cfg(ctypes.Structure):
    _fields_ = [
        (name, c_uint32)
        for name in ("n_blocks", "block_tokens", "n_layers", "n_kv_heads", "head_dim")
    ] + [("dtype", ctypes.c_int32), ("format", c_uint32)]


class _Stats(ctypes.Structure):
    _fields_ = [(name, c_uint32) for name in ("free", "used", "cached", "evictions")]


_F16, _FORMAT = 1, 1
_FUNCTIONS = {
    "tl_kv_pool_create": (c_int, [POINTER(_Cfg), POINTER(c_void_p)]),
    "tl_kv_pool_destroy": (None, [c_void_p]),
    "tl_kv_alloc": (c_int, [c_void_p, c_uint32, POINTER(c_uint32)]),
    "tl_kv_ref": (None, [c_void_p, c_uint32]),
    "tl_kv_unref": (c_int, [c_void_p, c_uint32]),
    "tl_kv_cow": (c_int, [c_void_p, c_uint32, POINTER(c_uint32)]),
    "tl_kv_set_fill": (c_int, [c_void_p, c_uint32, c_uint32]),
    "tl_kv_fill": (c_uint32, [c_void_p, c_uint32]),
    "tl_kv_register": (c_int, [c_void_p, c_uint32, c_uint64]),
    "tl_kv_block_ptr": (c_void_p, [c_void_p, c_uint32, c_uint32, c_int]),
    "tl_kv_stats_get": (None, [c_void_p, POINTER(_Stats)]),
    "tl_last_error": (c_char_p, []),
}


def open_library(file: Path) -> ctypes.CDLL:
    """Loads a library with the functions of tinyllm/kv_pool.h."""
    library = ctypes.CDLL(str(file))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class _Planes:
    def __init__(self, pool: OwnPool, id: int) -> None:
        self._pool, self._id = pool, id

    def __getitem__(self, at: tuple[int, int], /) -> NDArray[np.float16]:
        return self._pool.plane(self._id, *at)


class OwnPool:
    """One pool of a library; the methods are those of :class:`kvpool.Pool`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        n_blocks: int,
        block_tokens: int,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
    ) -> None:
        self._library = library
        self.block_tokens, self.n_layers = block_tokens, n_layers
        self.n_kv_heads, self.head_dim = n_kv_heads, head_dim
        cfg = _Cfg(n_blocks, block_tokens, n_layers, n_kv_heads, head_dim, _F16, _FORMAT)
        self._pool = c_void_p()
        self._check(library.tl_kv_pool_create(byref(cfg), byref(self._pool)))

    def __del__(self) -> None:
        self._library.tl_kv_pool_destroy(self._pool)

    def _check(self, status: int) -> None:
        if status != 0:
            text = (self._library.tl_last_error() or b"").decode("utf-8", "replace")
            raise BY_STATUS.get(status, KvPoolError)(f"status {status}: {text}")

    def alloc(self, n: int) -> list[int]:
        ids = (c_uint32 * max(n, 1))()
        self._check(self._library.tl_kv_alloc(self._pool, n, ids))
        return list(ids[:n])

    def ref(self, ids: list[int]) -> None:
        for id in ids:
            self._library.tl_kv_ref(self._pool, id)

    def unref(self, ids: list[int]) -> None:
        for id in ids:
            self._check(self._library.tl_kv_unref(self._pool, id))

    def cow(self, ids: int) -> int:
        copy = c_uint32()
        self._check(self._library.tl_kv_cow(self._pool, ids, byref(copy)))
        return copy.value

    def set_fill(self, ids: int, n_tokens: int) -> None:
        self._check(self._library.tl_kv_set_fill(self._pool, ids, n_tokens))

    def fill(self, ids: int) -> int:
        return int(self._library.tl_kv_fill(self._pool, ids))

    def register(self, ids: int, hashes: int) -> None:
        self._check(self._library.tl_kv_register(self._pool, ids, hashes))

    def block(self, id: int) -> _Planes:
        return _Planes(self, id)

    def plane(self, id: int, layer: int, is_v: int) -> NDArray[np.float16]:
        """float16 (n_kv_heads, block_tokens, head_dim), where tl_kv_block_ptr says."""
        at = self._library.tl_kv_block_ptr(self._pool, id, layer, is_v)
        if not at:
            raise KvPoolError(f"tl_kv_block_ptr({id}, {layer}, {is_v}) is NULL")
        shape = (self.n_kv_heads, self.block_tokens, self.head_dim)
        values = (ctypes.c_uint16 * int(np.prod(shape))).from_address(at)
        plane: NDArray[np.float16] = np.ctypeslib.as_array(values).view(np.float16)
        return plane.reshape(shape)

    @property
    def stats(self) -> Stats:
        found = _Stats()
        self._library.tl_kv_stats_get(self._pool, byref(found))
        return Stats(found.free, found.used, found.cached, found.evictions)
