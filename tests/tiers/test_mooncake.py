"""Blocks in a Mooncake Store: a real master and two engines in namespaces of their own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tier_servers import free_port

import kvpool
from kvpool.tiers import open_tier

pytest.importorskip("mooncake.store", reason="Mooncake is not installed", exc_type=ImportError)

from faults import FAULTS
from mooncake_scenes import SCENES

NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--kill-child"]


@functools.cache
def why_no_namespaces() -> str:
    try:
        command = [*NAMESPACES, "ip", "link", "set", "lo", "up"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError as error:
        return str(error)
    return run.stderr if run.returncode else ""


@pytest.mark.parametrize("scene", [*SCENES, *FAULTS])
def test_scene(scene: str) -> None:
    if why_no_namespaces():
        pytest.skip(f"no network namespace: {why_no_namespaces()}")
    here = Path(__file__).with_name("mooncake_scenes.py")
    run = subprocess.run(
        [*NAMESPACES, sys.executable, str(here), scene],
        env={**os.environ, "GLOG_minloglevel": "3"}, text=True, timeout=120,
        capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-1500:] + run.stderr[-4000:]
    assert "scene held" in run.stdout


def test_no_master_is_told_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(kvpool.TransferError, match="open: no master"):
        open_tier(f"mooncake://127.0.0.1:{free_port()}")
    assert time.monotonic() - began < 10


def test_wrong_urls_name_what_is_wrong() -> None:
    for text, message in (
        ("mooncake:", "expected mooncake://host:port"),
        ("mooncake://a/b", "expected mooncake://host:port"),
        ("mooncake://a?segment=much", "segment: expected a size"),
        ("mooncake://a?segment=1MiB", "segment: expected 0 or at least 16 MiB, found 1048576"),
        ("mooncake://a?buffer=0", "buffer: expected at least 1 byte"),
        ("mooncake://a?replicas=0", "replicas: expected 1 to 64, found 0"),
        ("mooncake://a?timeout=0", "timeout: expected more than 0"),
        ("mooncake://a?ttl=1", "unknown option ttl"),
    ):
        with pytest.raises(kvpool.InvalidArgument, match=message):
            open_tier(text)
