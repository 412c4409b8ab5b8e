"""Every tier bears every fault: real servers, real files. Mooncake's row is in test_mooncake.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import FAULTS, S3, Backend, Disk, Memory, Valkey
from tier_servers import SeaweedFs

CELLS = [
    (tier, fault)
    for tier in ("memory", "disk", "redis", "valkey", "s3")
    for fault in FAULTS
    if (tier, fault) != ("s3", "full")
]


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: Any) -> Iterator[SeaweedFs]:
    pytest.importorskip("obstore", reason="obstore is not installed")
    server = SeaweedFs(tmp_path_factory.mktemp("weed"))
    yield server
    server.kill()


def make(tier: str, request: pytest.FixtureRequest, folder: Path) -> Backend:
    if tier == "memory":
        return Memory()
    if tier == "disk":
        return Disk(folder)
    if tier == "s3":
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
            request.getfixturevalue("monkeypatch").setenv(f"AWS_{name}", "any")
        return S3(request.getfixturevalue("seaweed"), folder.name)
    pytest.importorskip("redis", reason="redis is not installed")
    return Valkey(tier, folder)


@pytest.mark.parametrize(("tier", "fault"), CELLS)
def test_a_tier_bears_a_fault(
    tier: str, fault: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    backend = make(tier, request, tmp_path)
    try:
        FAULTS[fault](backend)
    finally:
        backend.close()
