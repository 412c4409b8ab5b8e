"""What the conformance tests share: the repository's golden files and the Python transcription."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFORMANCE = ROOT / "conformance"
FORMATS = ROOT / "formats"


def load(path: Path) -> ModuleType:
    """A file as a module, from where it lies."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


kvwire = load(CONFORMANCE / "drivers/kvwire.py")


def cases() -> list[dict[str, Any]]:
    paths = sorted((CONFORMANCE / "cases").glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


def envelopes(folder: str) -> list[dict[str, Any]]:
    """The entries of a golden manifest, each with its bytes under ``data``."""
    entries = json.loads((FORMATS / folder / "manifest.json").read_text())["envelopes"]
    return [{**entry, "data": (FORMATS / folder / entry["file"]).read_bytes()} for entry in entries]


def by_name(entry: dict[str, Any]) -> str:
    return str(entry.get("name") or entry["file"])
