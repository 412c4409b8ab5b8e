"""The examples of kvpool.tiers run, and every public name has one or says what it is."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import kvpool.tiers

RUN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
MODULES = sorted(module.name for module in pkgutil.iter_modules(kvpool.tiers.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    try:
        module = importlib.import_module(f"kvpool.tiers.{name}")
    except ImportError as error:
        pytest.skip(f"the client library is not installed: {error}")
    result = doctest.testmod(module, optionflags=RUN)
    assert not result.failed


@pytest.mark.parametrize("name", kvpool.tiers.__all__)
def test_public_names_are_documented(name: str) -> None:
    value = getattr(kvpool.tiers, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert (value.__doc__ or "").strip()
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            if not attribute.startswith("_") and inspect.isfunction(member):
                assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute}"
