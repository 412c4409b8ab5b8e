"""The examples in the replay's docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import kvpool.cli._tables
import kvpool.replay

MODULES = [
    kvpool.cli._tables.__name__,
    kvpool.replay.__name__,
    *(m.name for m in pkgutil.walk_packages(kvpool.replay.__path__, "kvpool.replay.")),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", ["ReuseStack", "policy_hits"])
def test_the_compiled_parts_examples_run(name: str) -> None:
    doc = getattr(kvpool.replay, name).__doc__
    test = doctest.DocTestParser().get_doctest(doc, {}, name, None, None)
    assert test.examples
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert not runner.summarize(verbose=False).failed


def test_every_public_name_is_documented() -> None:
    for name in kvpool.replay.__all__:
        value = getattr(kvpool.replay, name)
        if callable(value):
            assert (value.__doc__ or "").strip(), name
