"""The examples in the engine's and the commands' docstrings run."""

from __future__ import annotations

import doctest
import importlib

import engine_support  # noqa: F401  (skips without the model extra)
import pytest

MODULES = [
    *(f"kvpool.engine.{name}" for name in ("beam", "errors", "gguf_file", "linear", "paged")),
    *(f"kvpool.engine.{name}" for name in ("request", "sampling", "speculative")),
    "kvpool.cli",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
