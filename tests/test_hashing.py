"""Block hashes and the checksum, against plain Python."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool
from pool_support import H0, H1

TOKEN = st.integers(0, 2**32 - 1)


def fnv1a_chain(parent: int, tokens: list[int]) -> int:
    h = 0xCBF29CE484222325
    for byte in struct.pack(f"<Q{len(tokens)}I", parent, *tokens):
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h or 1


def crc32c_bitwise(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_worked_example() -> None:
    assert kvpool.block_hash(0, [1, 2]) == H0
    assert kvpool.block_hash(H0, [3, 4]) == H1
    hashes = kvpool.block_hashes([1, 2, 3, 4, 5], block_tokens=2)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == [H0, H1]


def test_the_same_tokens_under_another_parent_hash_differently() -> None:
    assert kvpool.block_hash(1, [3, 4]) != kvpool.block_hash(H0, [3, 4])


@given(st.integers(0, 2**64 - 1), st.lists(TOKEN, max_size=40))
def test_one_hash_is_fnv_1a_over_the_bytes(parent: int, tokens: list[int]) -> None:
    assert kvpool.block_hash(parent, tokens) == fnv1a_chain(parent, tokens)
    assert kvpool.block_hash(np.uint64(parent), np.array(tokens, np.uint32)) == fnv1a_chain(
        parent, tokens
    )


@given(st.integers(0, 2**64 - 1), st.lists(TOKEN, max_size=70), st.integers(1, 20))
def test_a_chain_is_one_hash_after_the_other(
    parent: int, tokens: list[int], block_tokens: int
) -> None:
    expected = []
    h = parent
    for i in range(0, len(tokens) - block_tokens + 1, block_tokens):
        h = fnv1a_chain(h, tokens[i : i + block_tokens])
        expected.append(h)
    assert kvpool.block_hashes(tokens, block_tokens, parent).tolist() == expected


@pytest.mark.parametrize("n", [4095, 4096, 100_000])
def test_long_prompts(n: int) -> None:
    tokens = np.random.default_rng(n).integers(0, 50_000, n)
    hashes = kvpool.block_hashes(tokens)
    assert len(hashes) == n // 16
    assert hashes[0] == fnv1a_chain(0, tokens[:16].tolist())
    k = len(hashes) - 1
    assert hashes[k] == fnv1a_chain(int(hashes[k - 1]), tokens[16 * k : 16 * k + 16].tolist())
    half = kvpool.block_hashes(tokens[: n // 32 * 16])
    rest = kvpool.block_hashes(tokens[n // 32 * 16 :], parent=half[-1])
    assert np.array_equal(np.concatenate([half, rest]), hashes)


def test_a_prompt_shorter_than_a_block_has_no_hash() -> None:
    assert kvpool.block_hashes(range(15)).shape == (0,)
    assert kvpool.block_hashes([]).shape == (0,)


def test_wrong_tokens_are_named() -> None:
    with pytest.raises(kvpool.InvalidArgument, match=r"tokens\[1\]: .*found -100"):
        kvpool.block_hashes([1, -100])
    with pytest.raises(kvpool.InvalidArgument, match=r"tokens\[0\]: .*found 4294967296"):
        kvpool.block_hash(0, np.array([2**32]))
    with pytest.raises(kvpool.InvalidArgument, match="block_tokens: expected at least 1, found 0"):
        kvpool.block_hashes([1], block_tokens=0)
    with pytest.raises(kvpool.InvalidArgument, match=r"parent: .*found -1"):
        kvpool.block_hashes([1], parent=-1)


def test_crc_check_value_and_continuation() -> None:
    assert kvpool.crc32c(b"123456789") == 0xE3069283
    assert kvpool.crc32c(b"") == 0
    assert kvpool.crc32c(b"", 5) == 5
    for cut in range(10):
        assert kvpool.crc32c(b"123456789"[cut:], kvpool.crc32c(b"123456789"[:cut])) == 0xE3069283


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_crc_is_the_bitwise_one(data: bytes, start: int) -> None:
    assert kvpool.crc32c(data, start) == crc32c_bitwise(data, start)


def test_crc_of_large_and_odd_buffers() -> None:
    data = random.Random(1).randbytes(200_001)
    whole = kvpool.crc32c(data)
    view = memoryview(data)
    for cut in (1, 7, 65_535, 65_536, 130_001):
        assert kvpool.crc32c(view[cut:], kvpool.crc32c(view[:cut])) == whole
    array = np.frombuffer(data[:200_000], np.float32).reshape(100, 500)
    assert kvpool.crc32c(array) == kvpool.crc32c(data[:200_000])
    assert kvpool.crc32c(bytearray(data)) == whole


@pytest.mark.parametrize("wrong", ["text", 5, None, [1, 2]])
def test_crc_needs_a_buffer(wrong: object) -> None:
    with pytest.raises(kvpool.ArgumentTypeError, match="buffer: expected bytes"):
        kvpool.crc32c(wrong)
    with pytest.raises(kvpool.InvalidArgument, match="C-contiguous"):
        kvpool.crc32c(memoryview(b"abcdef")[::2])
