"""Traces of any known format as one stream of requests; memory does not grow with their length.

    file -> plain, gzip or zstd -> pieces of whole lines -> rows -> batches of Request

>>> import json, pathlib, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     path = pathlib.Path(folder, "t.jsonl")
...     row = {"timestamp": 500, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}
...     _ = path.write_text(json.dumps(row))
...     with open_trace([str(path)]) as trace:
...         requests = [request for batch in trace for request in batch]
>>> trace.format, trace.block_tokens, requests[0].arrival_s, requests[0].ids.tolist()
('mooncake', 512, 0.5, [0, 1])
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import TraceError
from ..request import MAX_TOKENS, Request
from .source import Problems, Source

__all__ = ["FORMATS", "Trace", "open_trace"]


class Format(NamedTuple):
    """What is to be known about a format."""

    about: str
    block_tokens: int
    has_hashes: bool


FORMATS = {
    "mooncake": Format("Mooncake: JSON lines with hash_ids", 512, True),
    "bailian": Format("Qwen-Bailian: JSON lines with chat_id and hash_ids", 16, True),
    "azure": Format("Azure LLM inference: TIMESTAMP,ContextTokens,GeneratedTokens", 16, False),
    "burstgpt": Format("BurstGPT: Timestamp,Model,Request tokens,...", 16, False),
    "events": Format("KV events as vLLM publishes them, JSON lines", 16, True),
    "tokens": Format("JSON lines of token ids", 16, True),
}


class Trace:
    """One or more files of one format, read once: iterating gives lists of Request.

    Attributes: ``format``, ``block_tokens``, ``has_hashes`` (else nothing in it is known to be
    shared), ``problems`` (lines left out), ``position`` and ``size`` in bytes, for a bar.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        format: str | None = None,
        block_tokens: int | None = None,
        skip_bad: bool = False,
        synthetic_prefix: int = 0,
    ) -> None:
        if isinstance(paths, (str, os.PathLike)):
            paths = [os.fspath(paths)]
        if not paths:
            raise TraceError("no trace given")
        if block_tokens is not None and not 1 <= block_tokens <= 2**20:
            raise TraceError(f"block_tokens is {block_tokens}, expected 1 to {2**20}")
        if not 0 <= synthetic_prefix <= MAX_TOKENS:
            raise TraceError(f"synthetic_prefix is {synthetic_prefix}, expected 0 to {MAX_TOKENS}")
        self.problems = Problems(skip_bad)
        self.paths = [os.fspath(path) for path in paths]
        self._sources: list[Source] = []
        try:
            for i, path in enumerate(self.paths):
                self._sources.append(Source(path, i))
            firsts = [_FirstPiece(source) for source in self._sources]
            formats = [format or first.detect() for first in firsts]
            for path, other in zip(self.paths, formats, strict=True):
                if other != formats[0]:
                    raise TraceError(f"{self.paths[0]} is {formats[0]}, but {path} {other}")
            self.format = formats[0]
            if self.format not in FORMATS:
                raise TraceError(f"format {self.format!r}: expected one of {', '.join(FORMATS)}")
            self._read = _reader(self.format)  # here, so that reading is all that is timed later
            about = FORMATS[self.format]
            self.has_hashes = about.has_hashes or synthetic_prefix > 0
            self.block_tokens = block_tokens or firsts[0].block_size() or about.block_tokens
        except BaseException:
            self.close()
            raise
        self._firsts = firsts
        self._synthetic_prefix = synthetic_prefix

    @property
    def position(self) -> int:
        """Bytes read so far."""
        return sum(source.position for source in self._sources)

    @property
    def size(self) -> int | None:
        """Bytes there are; None where that is not known."""
        sizes = [source.size for source in self._sources]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def __iter__(self) -> Iterator[list[Request]]:
        extra = (self._synthetic_prefix,) if self.format in ("azure", "burstgpt") else ()
        for first in self._firsts:
            yield from self._read(first, self.problems, self.block_tokens, *extra)

    def close(self) -> None:
        """Closes the files."""
        for source in self._sources:
            source.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_trace(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **options: Any
) -> Trace:
    """A :class:`Trace` of one file or of several.

    Raises TraceError where a file cannot be read or its format not told.
    """
    return Trace(paths, **options)


class _FirstPiece:
    """A source whose first piece was looked at, to tell its format, and is given again."""

    def __init__(self, source: Source) -> None:
        self.path, self.index = source.path, source.index
        self._pieces = source.pieces()
        self._first = next(self._pieces, None)
        if self._first is None or not self._first.data.strip():
            raise TraceError(f"{self.path}: it is empty")

    def pieces(self) -> Iterator[Any]:
        if self._first is not None:
            yield self._first
        yield from self._pieces

    def _line(self) -> str:
        assert self._first is not None
        return self._first.data.lstrip().split(b"\n", 1)[0].decode("utf-8", "replace").strip()

    def detect(self) -> str:
        line = self._line()
        if line.startswith(("{", "[")):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            found = _json_format(row)
        else:
            names = [name.strip('\ufeff" ') for name in line.split(",")]
            lengths = {"ContextTokens": "azure", "Request tokens": "burstgpt"}
            found = next((form for name, form in lengths.items() if name in names), None)
        if found is None:
            raise TraceError(
                f"{self.path}:1: no known format ({', '.join(FORMATS)}): {line[:60]!r}; "
                "--format says which it is"
            )
        return found

    def block_size(self) -> int | None:
        """Event logs carry it."""
        try:
            row = json.loads(self._line())
        except (ValueError, RecursionError):
            return None
        events = None
        if isinstance(row, dict):
            events = row.get("events", [row])
        elif isinstance(row, list) and len(row) > 1:
            events = row[1]
        for event in events if isinstance(events, list) else ():
            size = event.get("block_size") if isinstance(event, dict) else None
            if isinstance(size, int) and 0 < size <= 2**20:
                return size
        return None


def _json_format(row: Any) -> str | None:
    if isinstance(row, list):
        if len(row) > 1 and isinstance(row[1], list):
            return "events"
        return "tokens" if row and all(isinstance(x, int) for x in row) else None
    if not isinstance(row, dict):
        return None
    if "hash_ids" in row:
        return "bailian" if "chat_id" in row else "mooncake"
    if "events" in row or "block_hashes" in row or row.get("type") == "AllBlocksCleared":
        return "events"
    return "tokens" if {"tokens", "token_ids", "prompt_token_ids"} & set(row) else None


def _reader(name: str) -> Callable[..., Iterator[list[Request]]]:
    if name in ("mooncake", "bailian"):
        from . import hashed

        return hashed.read_mooncake if name == "mooncake" else hashed.read_bailian
    if name in ("azure", "burstgpt"):
        from . import lengths

        return lengths.read_azure if name == "azure" else lengths.read_burstgpt
    from . import tokens

    return tokens.read_events if name == "events" else tokens.read_tokens
