"""Traces that know only lengths: Azure's LLM inference traces and BurstGPT.

Azure (Patel et al., ISCA '24; Stojkovic et al., HPCA '25; CSV): ``TIMESTAMP`` (a date and time with
up to 7 decimals, in 2024 with a time zone), ``ContextTokens``, ``GeneratedTokens``.

BurstGPT (Wang et al., 2024; CSV): ``Timestamp`` in seconds, ``Model``, ``Request tokens``,
``Response tokens``, ``Total tokens``, ``Log Type``; newer files add columns. A failed request has
response 0.

They have no hashes, so nothing is known to be shared: each prompt gets ids of its own, and such a
trace replays occupancy and waiting. ``synthetic_prefix`` lets all prompts begin with the same
tokens.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import numpy as np

from ..request import MAX_TOKENS, Request, make_request, n_blocks_of
from .source import Problems, Source

__all__ = ["AZURE", "BURSTGPT", "read_azure", "read_burstgpt"]

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_MAX_BLOCKS = 1 << 20  # that a batch holds in memory, but for its last request
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)


def read_azure(
    source: Source, problems: Problems, block_tokens: int, synthetic_prefix: int = 0
) -> Iterator[list[Request]]:
    """Batches of requests, in the order of the file."""
    return _read(source, problems, AZURE, _moment, (1, 2), block_tokens, synthetic_prefix)


def read_burstgpt(
    source: Source, problems: Problems, block_tokens: int, synthetic_prefix: int = 0
) -> Iterator[list[Request]]:
    """The same; where there is a column ``Session ID``, it is the request's session."""
    return _read(source, problems, BURSTGPT, float, (2, 3), block_tokens, synthetic_prefix)


def _moment(text: str) -> float:
    """Seconds since 1970; datetime itself reads 3 or 6 decimals only before Python 3.11."""
    match = _MOMENT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no date and time")
    whole, fraction, zone = match.groups()
    moment = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp()
    if zone and zone != "Z":
        sign = -1 if zone[0] == "-" else 1
        moment -= sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    return moment + (float(fraction) if fraction else 0.0)


def _fields(line: str) -> list[str]:
    return next(csv.reader([line])) if '"' in line else line.split(",")


def _length(text: str, name: str, minimum: int) -> int:
    value = int(float(text)) if "." in text else int(text)
    if not minimum <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is {value}, expected {minimum} to {MAX_TOKENS}")
    return value


def _read(
    source: Source,
    problems: Problems,
    header: tuple[str, ...],
    when: Callable[[str], float],
    columns: tuple[int, int],
    block_tokens: int,
    synthetic_prefix: int,
) -> Iterator[list[Request]]:
    at = {name: i for i, name in enumerate(header)}
    n_fields, serial = len(header), source.index << 40  # no file's ids are another's
    names = [header[i] for i in columns]
    shared = np.arange(2**62, 2**62 + synthetic_prefix // block_tokens, dtype=np.uint64)
    for piece in source.pieces():
        batch: list[Request] = []
        held = 0
        lines = piece.data.decode("utf-8", "replace").split("\n")
        for number, line in enumerate(lines, start=piece.line):
            if not line.strip():
                continue
            try:
                fields = _fields(line.rstrip("\r"))
            except csv.Error as error:
                problems.add(source.path, number, str(error))
                continue
            if number == 1 and fields[0].strip("\ufeff ").lower() == "timestamp":
                fields[0] = header[0]
                at = {name.strip(): i for i, name in enumerate(fields)}
                n_fields = len(fields)
                missing = [name for name in names if name not in at]
                if missing:
                    problems.add(source.path, 1, f"no column {missing[0]!r}")
                continue
            try:
                if len(fields) < n_fields:
                    raise ValueError(f"{len(fields)} fields, expected {n_fields}")
                arrival = when(fields[0])
                if not abs(arrival) < 1e18:
                    raise ValueError(f"{header[0]} is {fields[0]}")
                n_in = _length(fields[at[names[0]]], names[0], 1)
                n_out = _length(fields[at[names[1]]], names[1], 0)
            except (ValueError, OverflowError) as error:
                problems.add(source.path, number, str(error))
                continue
            n = n_blocks_of(n_in, block_tokens)
            ids = np.arange(serial, serial + n, dtype=np.uint64)
            same = min(len(shared), n_in // block_tokens)
            ids[:same] = shared[:same]
            serial += n
            held += n
            session = fields[at["Session ID"]] if "Session ID" in at else None
            batch.append(make_request(arrival, ids, n_in, n_out, session=session))
            if held >= _MAX_BLOCKS:  # a line of 50 bytes may be a prompt of millions of blocks
                yield batch
                batch, held = [], 0
        if batch:
            yield batch
