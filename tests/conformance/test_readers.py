"""Every reader and writer of the project over the golden envelopes, good and bad.

Written twice, in C and in Python: where they disagree, one of them misreads formats/kv-block.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance_support import by_name, cases, envelopes, kvwire

import kvpool
from kvpool.errors import BY_STATUS

GOOD, BAD = envelopes("golden"), envelopes("golden-errors")
STATUS = {"TL_ESHAPE": 3, "TL_EFULL": 5, "TL_EFORMAT": 7}


def pool_for(entry: dict[str, Any]) -> kvpool.Pool:
    return kvpool.Pool(**entry["pool"])


def python_status(entry: dict[str, Any]) -> tuple[str, int | None]:
    try:
        kvwire.read(entry["data"], kvwire.shape_of(entry["pool"]), entry["pool"]["n_blocks"])
    except kvwire.Refused as refused:
        return refused.status, refused.rule
    return "TL_OK", None


@pytest.mark.parametrize("entry", GOOD, ids=by_name)
def test_good_envelopes_are_read_by_both(entry: dict[str, Any]) -> None:
    assert python_status(entry) == ("TL_OK", None)
    pool = pool_for(entry)
    ids = pool.import_(entry["data"])
    again = pool.export(ids)
    assert (again == entry["data"]) == entry["canonical"]
    shape = kvwire.shape_of(entry["pool"])
    assert again == kvwire.write(shape, kvwire.read(entry["data"], shape))
    pool.check()


@pytest.mark.parametrize("entry", BAD, ids=by_name)
def test_bad_envelopes_are_refused_by_both_with_the_same_status(entry: dict[str, Any]) -> None:
    assert python_status(entry) == (entry["status"], entry["rule"])
    pool = pool_for(entry)
    kept = pool.alloc()
    pool.block(kept)[:] = 1.5
    if entry["status"] == "TL_EFULL":
        pool.unref(kept)
    before = pool.stats
    with pytest.raises(BY_STATUS[STATUS[entry["status"]]]) as error:
        pool.import_(entry["data"])
    assert "tl_kv_import" in str(error.value)
    assert pool.stats == before
    assert bool(np.all(pool.block(kept) == 1.5))
    pool.check()


@pytest.mark.parametrize("entry", GOOD, ids=by_name)
def test_any_bit_of_a_good_envelope_flipped_is_refused_by_both(entry: dict[str, Any]) -> None:
    pool = pool_for(entry)
    data = bytearray(entry["data"])
    # Every bit of the header, of the first record's fields and of the trailer; a few in between.
    n_bits = 8 * len(data)
    bits = {*range(min(n_bits, 320)), *range(n_bits - 32, n_bits), *range(0, n_bits, 1013)}
    for bit in sorted(bits):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(kvpool.CorruptEnvelope):
            pool.import_(data)
        data[bit // 8] ^= 1 << bit % 8
    assert pool.stats.free == pool.n_blocks
    pool.import_(data)


def test_every_rule_of_the_page_refuses_something() -> None:
    rules = {entry["rule"] for entry in BAD}
    assert rules == {0, 1, 2, 3, 4, 5, 6}
    # Behind the checksum means with a right one: else it is rule 3 that refused.
    for entry in BAD:
        if entry["rule"] in (0, 4, 5, 6):
            data = entry["data"]
            assert kvwire.crc32c(data[:-4]) == int.from_bytes(data[-4:], "little"), entry["file"]


@pytest.mark.parametrize("case", cases(), ids=by_name)
def test_the_package_writes_the_golden_envelope_of_each_case(case: dict[str, Any]) -> None:
    """What a parity driver does, with kvpool.Pool."""
    tokens, B = case["tokens"], case["block_tokens"]
    shape = {key: case[key] for key in ("block_tokens", "n_layers", "n_kv_heads", "head_dim")}
    n = -(-len(tokens) // B)
    pool, second = kvpool.Pool(n, **shape), kvpool.Pool(n, **shape)
    for each in (pool, second):
        each.slab.view(np.uint16)[:] = 0xFFFF
    ids = pool.alloc(n)
    values = np.array(case["values"], np.uint16).reshape(
        len(tokens), case["n_layers"], 2, case["n_kv_heads"], case["head_dim"]
    )
    for i, block in enumerate(ids):
        part = values[i * B : (i + 1) * B]
        view = pool.block(int(block)).view(np.uint16)
        view[:, :, :, : len(part), :] = part.transpose(1, 2, 3, 0, 4)
        pool.set_fill(int(block), len(part))
    hashes = kvpool.block_hashes(tokens, block_tokens=B)
    pool.register(ids[: len(hashes)], hashes)
    first = pool.export(ids)
    assert first.hex() == case["envelope"]
    assert second.export(second.import_(first)) == first


def test_the_size_of_an_envelope_is_exact_to_the_last_byte_of_64_bits() -> None:
    # n * (12 + P) = 2^64 - 4: header and trailer no longer fit. One block of 8.6 GB, never touched.
    with kvpool.Pool(1, 1, n_layers=1, n_kv_heads=1, head_dim=2**31 - 2) as pool:
        n = 2**31 - 1
        assert n * (12 + pool.block_bytes) == 2**64 - 4
        with pytest.raises(kvpool.InvalidArgument, match="overflow"):
            pool.export_bytes(n)
        assert pool.export_bytes(n - 1) == 32 + (n - 1) * (12 + pool.block_bytes)
