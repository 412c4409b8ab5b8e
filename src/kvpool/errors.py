"""Every error that kvpool raises, one class for each status of the C library.

    KvPoolError
     +-- InvalidArgument (ValueError)        TL_EINVAL       a wrong value: outside its range
     |    +-- ArgumentTypeError (TypeError)                  a wrong kind of object: a float, a bool
     +-- ShapeMismatch (ValueError)          TL_ESHAPE       an envelope made for another pool
     +-- DtypeMismatch (TypeError)           TL_EDTYPE       element types disagree
     +-- PoolFull                            TL_EFULL        not enough blocks; nothing was taken
     |    +-- OutOfBlocks                                    the same, of PagedKVCache
     +-- NotFound (KeyError)                 TL_ENOTFOUND    (a lookup that misses returns None)
     +-- CorruptEnvelope (ValueError)        TL_EFORMAT      bytes that break the format's rules
     +-- Busy                                TL_EBUSY        a second manager (register: False)
     +-- Unsupported                         TL_EUNSUPPORTED well formed, but not in this version
     +-- StorageError (OSError)              TL_EIO          the system refused to read or write
     +-- TransferError (ConnectionError)                     a peer could not be reached or trusted

TL_ENOMEM is Python's own MemoryError. The text is the C library's: it names the function, what was
found and what was expected. A call that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "BY_STATUS",
    "ArgumentTypeError",
    "Busy",
    "CorruptEnvelope",
    "DtypeMismatch",
    "InvalidArgument",
    "KvPoolError",
    "NotFound",
    "OutOfBlocks",
    "PoolFull",
    "ShapeMismatch",
    "StorageError",
    "TransferError",
    "Unsupported",
]


class KvPoolError(Exception):
    """The base of kvpool's errors.

    Raised itself only by ``Pool.check()``, for a pool that disagrees with itself.

    >>> import kvpool
    >>> issubclass(kvpool.PoolFull, kvpool.KvPoolError)
    True
    """


class InvalidArgument(KvPoolError, ValueError):
    """An argument is outside its documented range (TL_EINVAL). Also a ``ValueError``.

    >>> import kvpool
    >>> pool = kvpool.Pool(2, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> pool.unref(0)
    Traceback (most recent call last):
    kvpool.errors.InvalidArgument: tl_kv_unref: nobody holds block 0
    """


class ArgumentTypeError(InvalidArgument, TypeError):
    """An argument is the wrong kind of object: a float, a bool or a string where an integer is due.

    Also a ``TypeError``, and an ``InvalidArgument``: one ``except`` catches every wrong argument.

    >>> import kvpool
    >>> pool = kvpool.Pool(2, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> pool.refs(0.5)
    Traceback (most recent call last):
    kvpool.errors.ArgumentTypeError: ids: expected an integer from 0 to 4294967295, or a list, \
tuple, range or 1-D array of integers, found 0.5 (float)
    """


class ShapeMismatch(KvPoolError, ValueError):
    """An envelope's dimensions differ from the pool's (TL_ESHAPE). Also a ``ValueError``."""


class DtypeMismatch(KvPoolError, TypeError):
    """Element types disagree (TL_EDTYPE). Also a ``TypeError``."""


class PoolFull(KvPoolError):
    """Fewer blocks are free or cached than were asked for (TL_EFULL); none was taken.

    >>> import kvpool
    >>> pool = kvpool.Pool(2, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> pool.alloc(3)
    Traceback (most recent call last):
    kvpool.errors.PoolFull: tl_kv_alloc: 3 blocks needed, 2 are free and 0 cached
    """


class OutOfBlocks(PoolFull):
    """A ``PagedKVCache`` needs more blocks than the pool can give; nothing has changed."""


class NotFound(KvPoolError, KeyError):
    """Nothing under that name (TL_ENOTFOUND). Also a ``KeyError``."""

    __str__ = Exception.__str__  # KeyError would show the repr of the text


class CorruptEnvelope(KvPoolError, ValueError):
    """Bytes that are no valid envelope (TL_EFORMAT); nothing was imported. Also a ``ValueError``.

    >>> import kvpool
    >>> pool = kvpool.Pool(2, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> pool.import_(b"TLKV")
    Traceback (most recent call last):
    kvpool.errors.CorruptEnvelope: tl_kv_import: length 4, an envelope has at least 32 bytes \
(rule 1)
    """


class Busy(KvPoolError):
    """Somebody else holds it (TL_EBUSY): a pool has one BlockManager at a time.

    >>> import kvpool
    >>> pool = kvpool.Pool(2, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> mgr = kvpool.BlockManager(pool)
    >>> kvpool.BlockManager(pool)
    Traceback (most recent call last):
    kvpool.errors.Busy: the pool has a block manager already; close that one first
    """


class Unsupported(KvPoolError):
    """Well formed, but not in this version; or a pool in a fork child (TL_EUNSUPPORTED)."""


class StorageError(KvPoolError, OSError):
    """The system refused to read or write (TL_EIO). Also an ``OSError``."""


class TransferError(KvPoolError, ConnectionError):
    """A peer could not be reached or did not keep to the protocol. Also a ``ConnectionError``."""


#: What each status of the C library raises (``tinyllm/abi.h``; 0 is TL_OK).
BY_STATUS: Mapping[int, type[Exception]] = MappingProxyType(
    {
        1: InvalidArgument,
        2: MemoryError,
        3: ShapeMismatch,
        4: DtypeMismatch,
        5: PoolFull,
        6: NotFound,
        7: CorruptEnvelope,
        8: Busy,
        9: Unsupported,
        10: StorageError,
    }
)
