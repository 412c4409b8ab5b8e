"""The examples of kvpool.integrations run, and every public name has one."""

from __future__ import annotations

import doctest
import importlib

import pytest

RUN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_examples_run(name: str) -> None:
    pytest.importorskip(name, reason=f"needs {name}")
    module = importlib.import_module(f"kvpool.integrations.{name}")
    results = doctest.testmod(module, optionflags=RUN)
    assert results.failed == 0
    assert results.attempted > 5


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_public_names_are_documented(name: str) -> None:
    pytest.importorskip(name, reason=f"needs {name}")
    module = importlib.import_module(f"kvpool.integrations.{name}")
    for public in module.__all__:
        value = getattr(module, public)
        if not isinstance(value, type):
            continue
        assert value.__doc__, public
        for attribute, member in vars(value).items():
            if not attribute.startswith("_"):
                assert getattr(member, "__doc__", None), f"{public}.{attribute}"
