"""Envelopes as buffers, streams and files: read, checked, written, kept.

    a buffer      Envelope               validated whole, then views without a copy
    a stream      StreamReader, -Writer  one block in memory at a time
    a file        EnvelopeFile           checked and read in bounded memory; new_file is atomic
    a session     save, load             a sequence to a file and back, sealed to its tokens

Validation is one piece of code, the C library's: ``EnvelopeHeader``. Errors are ``CorruptEnvelope``
and ``ShapeMismatch``; their text names the rule of formats/kv-block.md, the field and its offset,
what was found and what was expected. Nothing here needs a pool but ``load`` and ``import_stream``.

>>> import numpy as np
>>> import kvpool
>>> from kvpool.wire import Envelope
>>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
>>> ids = pool.alloc(2)
>>> pool.slab[ids] = 0.5
>>> pool.set_fill(ids, [2, 1])
>>> envelope = Envelope(pool.export(ids))
>>> len(envelope), envelope.n_tokens.tolist(), envelope.payload.shape
(2, [2, 1], (2, 1, 2, 1, 2, 2))
>>> envelope[1].k
array([[[[0.5, 0.5]]]], dtype=float16)
"""

from __future__ import annotations

from kvpool._core import EnvelopeHeader, crc32c_combine

from .envelope import Block, Envelope
from .files import EnvelopeFile, new_file, write_file
from .seal import Seal, token_digests
from .session import load, save
from .stream import StreamReader, StreamWriter, import_stream

__all__ = [
    "Block",
    "Envelope",
    "EnvelopeFile",
    "EnvelopeHeader",
    "Seal",
    "StreamReader",
    "StreamWriter",
    "crc32c_combine",
    "import_stream",
    "load",
    "new_file",
    "save",
    "token_digests",
    "write_file",
]
