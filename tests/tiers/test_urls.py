"""URLs of tiers that are wrong: told in our words, and without the password that may be in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import kvpool
from kvpool.tiers import open_tier

needs_redis = pytest.mark.skipif(
    importlib.util.find_spec("redis") is None, reason="redis is not installed"
)


@pytest.mark.parametrize(
    "url",
    [
        "valky://me:hunter2@host:6379/0",
        "me:hunter2@host:6379",
        "//me:hunter2@host",
        "valkey://me:hunter2@host?ttl",
        "valkey://me:hunter2@host?ttl=1&ttl=2",
        "valkey://me:hunter2@host#0",
        "valkey://me:[hunter2@host",
        "valkey://me:hunter2@host\u2100",
        "valkey://me:hunter2?@host",
        "disk://me:hunter2@host/path",
        pytest.param("valkey://me:hunter2@host:x", marks=needs_redis),
        pytest.param("valkey://me:hunter2@host:66000", marks=needs_redis),
        pytest.param("valkey://me:hunter2@host/zero", marks=needs_redis),
        pytest.param("valkey://me:hunter2/2@host/0", marks=needs_redis),
        pytest.param("valkey://me:hunter2@host?password_file=/nowhere", marks=needs_redis),
        pytest.param("valkey://me:hunter2@host?tll=1", marks=needs_redis),
    ],
)
def test_a_password_is_not_in_what_is_told(url: str) -> None:
    with pytest.raises(kvpool.InvalidArgument) as refused:
        open_tier(url)
    error: BaseException | None = refused.value
    while error is not None:  # a traceback prints these too
        assert "hunter2" not in str(error)
        error = None if error.__suppress_context__ else error.__context__


def test_a_password_is_not_told_by_s3_and_mooncake_either() -> None:
    for module, url in (
        ("obstore", "s3://me:hunter2@bucket/prefix"),
        ("obstore", "s3://bucket/prefix?endpoint=http://me:hunter2@host:1"),
        ("mooncake", "mooncake://me:hunter2@host:50051"),
    ):
        if importlib.util.find_spec(module) is not None:
            with pytest.raises(kvpool.InvalidArgument) as refused:
                open_tier(url)
            assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("size", ["9" * 400, "1" + "0" * 19, "8388608TiB", "-1", "1e3", "nan", "0"])
def test_sizes_that_are_none(tmp_path: Path, size: str) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="size: expected"):
        open_tier(f"disk:{tmp_path}/kv.slab?size={size}")
    assert not (tmp_path / "kv.slab").exists()


@needs_redis
def test_a_password_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "no-text").write_bytes(b"\xff\xfe")
    for name, why in (("nowhere", "No such file"), ("no-text", "no text")):
        with pytest.raises(kvpool.InvalidArgument, match=f"password_file: .*{name}: {why}"):
            open_tier(f"valkey://host?password_file={tmp_path}/{name}")
