"""What the workbench's tests share: workspaces, and `ol` called in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.workbench import main
from kvpool.workbench.assets import OWN_TESTS, POOL_C, Assets, find_assets

from .workbench_support import Ol, OlJson


@pytest.fixture(scope="session", autouse=True)
def _shared_objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache of compiled objects for all tests: the library is built once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OL_CACHE", str(tmp_path_factory.mktemp("objects")))
        yield


@pytest.fixture(scope="session")
def assets() -> Assets:
    return find_assets()


@pytest.fixture
def ol(capsys: pytest.CaptureFixture[str]) -> Ol:
    """Runs `ol` and returns its exit code and all that it printed."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        code = main([str(word) for word in arguments])
        out = capsys.readouterr()
        return code, out.out + out.err

    return run


@pytest.fixture
def ol_json(capsys: pytest.CaptureFixture[str]) -> OlJson:
    """Runs `ol ... --json` and returns its exit code and the document."""

    def run(*arguments: str | Path) -> tuple[int, Any]:
        code = main([*(str(word) for word in arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def workspace(tmp_path: Path, ol: Ol) -> Path:
    """A fresh workspace: the stub, no tests."""
    folder = tmp_path / "ws"
    code, _ = ol("start", "rt.04", "--dir", folder)
    assert code == 0
    return folder


@pytest.fixture
def solved(workspace: Path, assets: Assets) -> Path:
    """A workspace with the reference copied in, and the reference's own tests."""
    shutil.copyfile(assets.pool_c, workspace / POOL_C)
    for path in assets.own_tests:
        shutil.copyfile(path, workspace / OWN_TESTS / path.name)
    return workspace
