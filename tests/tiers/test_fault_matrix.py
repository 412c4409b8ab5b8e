"""Every tier bears every fault: real servers, real files. Mooncake's row is in test_mooncake.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FAULTS, Backend, Disk, Memory, Valkey


def make(tier: str, folder: Path) -> Backend:
    if tier == "memory":
        return Memory()
    if tier == "disk":
        return Disk(folder)
    pytest.importorskip("redis", reason="redis is not installed")
    return Valkey(tier, folder)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tier", ["memory", "disk", "redis", "valkey"])
def test_a_tier_bears_a_fault(tier: str, fault: str, tmp_path: Path) -> None:
    backend = make(tier, tmp_path)
    try:
        FAULTS[fault](backend)
    finally:
        backend.close()
