"""Namespaces: golden roots, the encoding built by hand, and what must differ from what."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool

GOLDEN: list[tuple[dict[str, Any], int]] = [
    ({}, 0),
    ({"images": []}, 0),
    ({"model": "SmolLM2-135M", "adapter": "sql"}, 0xF0D93A4C4376325D),
    ({"model": "m"}, 0x66CCB68423938268),
    ({"revision": "m"}, 0xED97843170E884B8),
    ({"adapter": "m"}, 0x89A273711BA44115),
    ({"salt": "m"}, 0x52864F3D7C554F05),
    ({"images": ["m"]}, 0x3A61DF937D549BBD),
    ({"salt": b"m"}, 0x136963C4D3C8CE8C),
    ({"salt": 0}, 0x54387953A03C9D26),
    ({"salt": -1}, 0xCBF7C02DB6793B11),
    ({"salt": 2**64}, 0x951D8940E434A148),
    (
        {
            "model": "Modell-ß",
            "revision": 7,
            "adapter": b"\x00",
            "salt": "tenant",
            "images": [b"\x01\x02", 3, "x"],
        },
        0xBBB72F17FD654A5E,
    ),
]


@pytest.mark.parametrize(("fields", "root"), GOLDEN)
def test_roots_are_the_same_in_every_release(fields: dict[str, Any], root: int) -> None:
    assert kvpool.namespace(**fields) == root


def test_roots_are_the_same_in_every_process() -> None:
    code = f"import kvpool; print([kvpool.namespace(**f) for f, _ in {GOLDEN!r}])"
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.stdout.strip() == str([root for _, root in GOLDEN])


def test_the_encoding_is_the_documented_one() -> None:
    def value(kind: int, content: bytes, length: int | None = None) -> bytes:
        return (
            bytes([kind])
            + (len(content) if length is None else length).to_bytes(8, "little")
            + content
        )

    message = (
        b"\x01" + value(1, "Modell-ß".encode())
        + b"\x02" + value(3, b"\x07")
        + b"\x03" + value(2, b"\x00")
        + b"\x04" + value(1, b"tenant")
        + b"\x05" + value(4, value(2, b"\x01\x02") + value(3, b"\x03") + value(1, b"x"), 3)
    )  # fmt: skip
    digest = hashlib.blake2b(message, digest_size=8, person=b"kvpool.namespace").digest()
    assert int.from_bytes(digest, "little") == GOLDEN[-1][1]


def test_nothing_that_differs_is_confused() -> None:
    fields: list[dict[str, Any]] = [
        *({name: "x"} for name in ("model", "revision", "adapter", "salt")),
        {"images": ["x"]},
        {"images": ["x", "x"]},
        {"images": ["xx"]},
        {"salt": b"x"},
        {"salt": ord("x")},
        {"salt": "1"},
        {"salt": b"1"},
        {"salt": 1},
        {"model": "ab", "revision": "c"},
        {"model": "a", "revision": "bc"},
        {"model": "abc"},
        {"images": ["a", "b"]},
        {"images": ["b", "a"]},
        {"images": ["ab"]},
        {"model": "a", "images": ["b"]},
        # what one field would look like inside another
        {"model": b"a\x02\x01" + (1).to_bytes(8, "little") + b"c"},
        {"model": "a", "revision": "c"},
    ]
    roots = [kvpool.namespace(**f) for f in fields]
    assert len(set(roots)) == len(fields)
    assert 0 not in roots


def test_the_order_of_the_fields_does_not_matter() -> None:
    fields = {"model": "m", "revision": 1, "adapter": "a", "salt": b"s", "images": ["i"]}
    roots = {
        kvpool.namespace(**dict(order))  # type: ignore[arg-type]
        for order in itertools.permutations(fields.items())
    }
    assert len(roots) == 1


def test_a_field_that_is_none_is_left_out() -> None:
    assert kvpool.namespace(model="m", salt=None, images=None) == kvpool.namespace(model="m")
    assert kvpool.namespace(images=iter(["a"])) == kvpool.namespace(images=("a",))


VALUE = st.one_of(st.text(min_size=1), st.binary(min_size=1), st.integers())
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("model", "revision", "adapter", "salt"), VALUE),
        "images": st.lists(VALUE, min_size=1),
    },
)


def typed(value: object) -> object:
    """1 == True and "" == "" across kinds in Python's eyes; here the kind is part of the value."""
    if isinstance(value, list):
        return tuple(map(typed, value))
    return type(value).__name__, value


@given(FIELDS, FIELDS)
def test_roots_are_equal_only_for_equal_fields(a: dict[str, Any], b: dict[str, Any]) -> None:
    root_a, root_b = kvpool.namespace(**a), kvpool.namespace(**b)
    assert 0 <= root_a < 2**64
    assert (root_a == 0) == (not a)
    same = {k: typed(v) for k, v in a.items()} == {k: typed(v) for k, v in b.items()}
    assert (root_a == root_b) == same


@pytest.mark.parametrize("bad", [True, 1.5, [], ["x"], {}, object(), bytearray(b"x"), np.int64(1)])
def test_a_field_of_another_type_is_refused(bad: Any) -> None:
    with pytest.raises(kvpool.ArgumentTypeError, match="namespace: salt: expected str, bytes or"):
        kvpool.namespace(salt=bad)
    with pytest.raises(kvpool.ArgumentTypeError, match=r"namespace: images\[1\]: expected"):
        kvpool.namespace(images=["x", bad])


@pytest.mark.parametrize("bad", ["x", b"x", 7, True])
def test_images_is_a_list(bad: Any) -> None:
    with pytest.raises(kvpool.ArgumentTypeError, match="namespace: images: expected a list"):
        kvpool.namespace(images=bad)


def test_an_empty_field_is_refused() -> None:
    for empty in ("", b""):
        with pytest.raises(kvpool.InvalidArgument, match="salt is empty"):
            kvpool.namespace(salt=empty)
    with pytest.raises(kvpool.InvalidArgument, match=r"images\[0\] is empty"):
        kvpool.namespace(images=[""])
    with pytest.raises(kvpool.InvalidArgument, match="model is not valid Unicode"):
        kvpool.namespace(model="\ud800")


def test_fields_have_names() -> None:
    with pytest.raises(TypeError):
        kvpool.namespace("m")  # type: ignore[call-arg]


def test_blocks_of_two_namespaces_have_other_names() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    a = kvpool.block_hashes(tokens, parent=kvpool.namespace(salt="a"))
    b = kvpool.block_hashes(tokens, parent=kvpool.namespace(salt="b"))
    plain = kvpool.block_hashes(tokens)
    assert not set(a.tolist()) & set(b.tolist())
    assert not set(a.tolist()) & set(plain.tolist())
