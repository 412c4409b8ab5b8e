"""Every public name has a docstring with what a caller needs, and its examples run.

doctest's own finder does not see the methods of a compiled class, so the names are collected here.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import numpy as np
import pytest

import kvpool
import kvpool.wire

RUN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def public_objects() -> dict[str, object]:
    found: dict[str, object] = {"kvpool": kvpool}
    names = [(name, getattr(kvpool, name)) for name in kvpool.__all__]
    names += [(f"attention.{n}", getattr(kvpool.attention, n)) for n in kvpool.attention.__all__]
    for name, value in names:
        if name == "attention":
            found[name] = value
        if not callable(value):
            continue
        found[name] = value
        if inspect.isclass(value) and not issubclass(value, (Exception, tuple)):
            for attribute, member in vars(value).items():
                if not attribute.startswith("_"):
                    found[f"{name}.{attribute}"] = member
    return found


OBJECTS = public_objects()


@pytest.mark.parametrize("name", OBJECTS)
def test_public_names_are_documented(name: str) -> None:
    assert (OBJECTS[name].__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("name", OBJECTS)
def test_examples_run(name: str) -> None:
    doc = OBJECTS[name].__doc__ or ""
    examples = doctest.DocTestParser().get_doctest(
        doc, {"kvpool": kvpool, "np": np}, name, None, None
    )
    is_error = isinstance(OBJECTS[name], type) and issubclass(OBJECTS[name], Exception)
    is_attribute = inspect.isdatadescriptor(OBJECTS[name])
    if not examples.examples:
        assert is_error or is_attribute, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=RUN)
    output: list[str] = []
    runner.run(examples, out=output.append)
    assert not runner.summarize(verbose=False).failed, "".join(output)


@pytest.mark.parametrize("name", [n for n in OBJECTS if n.startswith("Pool.")])
def test_methods_say_what_they_raise_and_where_they_come_from(name: str) -> None:
    doc = OBJECTS[name].__doc__ or ""
    if inspect.isroutine(OBJECTS[name]) or "nb_method" in type(OBJECTS[name]).__name__:
        assert "Raises:" in doc or name in ("Pool.close",), name
    if name.split(".")[1] in ("alloc", "ref", "unref", "cow", "register", "lookup", "export"):
        assert "Source: seed section" in doc


WIRE = [f"kvpool.wire.{m.name}" for m in pkgutil.iter_modules(kvpool.wire.__path__)]


@pytest.mark.parametrize("module", ["kvpool.wire", *WIRE])
def test_examples_of_the_wire_modules_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=RUN)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("name", kvpool.wire.__all__)
def test_public_names_of_the_wire_are_documented(name: str) -> None:
    assert ">>>" in (getattr(kvpool.wire, name).__doc__ or "")
