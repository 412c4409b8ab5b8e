"""Imports single modules out of an unpacked wheel, with stand-ins for everything around them.

A block manager is a few thousand lines of plain Python that import, mostly for annotations, an
engine, a tensor library and a configuration system. Under `isolated` the modules named as real are
loaded from the wheel as they are; every other module of the named packages is hollow: whatever is
asked of it is a class that can be called, subclassed, subscripted and combined, and does nothing.
What a manager really uses at run time is therefore in the list of real modules, or given as an
override.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Hollow", "isolated"]


class _HollowType(type):
    """A class whose every attribute, item, union and call is a hollow thing again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls


class Hollow(metaclass=_HollowType):
    """Stands in for a class, a function, a constant or an instance that is never really used."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None


def _nothing(*args: object, **kwargs: object) -> None:
    return None


class _HollowModule(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package: it may have submodules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(
        self,
        root: Path,
        packages: Collection[str],
        real: Collection[str],
        overrides: Mapping[str, Mapping[str, object]],
    ) -> None:
        self.root, self.packages, self.real, self.overrides = root, packages, real, overrides

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        if fullname in self.real:
            file = self.root.joinpath(*fullname.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.overrides.get(module.__name__, {}))


@contextmanager
def isolated(
    root: Path,
    *,
    packages: Collection[str],
    real: Collection[str],
    overrides: Mapping[str, Mapping[str, object]] = {},
) -> Iterator[None]:
    """Within the block, modules of `packages` come from `root` (those in `real`) or are hollow.

    `overrides` gives names in hollow modules a value. A package that is installed and imported
    already is not disturbed afterwards: what was loaded here is taken out of ``sys.modules``.
    """

    def ours(name: str) -> bool:
        return name.partition(".")[0] in packages

    before = {name: module for name, module in sys.modules.items() if ours(name)}
    for name in before:
        del sys.modules[name]
    finder = _Finder(root, packages, real, overrides)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)
