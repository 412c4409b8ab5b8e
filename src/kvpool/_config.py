"""Where the installed C headers and the shared library are, for programs that use them from C."""

from __future__ import annotations

import os

from . import _core

__all__ = ["get_include", "get_library"]

# Headers and library lie beside the compiled module, which in an editable install is not where the
# Python files are. (os.path, because pathlib takes longer to import than the whole core.)
_ROOT = os.path.dirname(os.path.abspath(_core.__file__))


def get_include() -> str:
    """The directory to give a C compiler with ``-I``: it holds ``tinyllm.h`` and ``tinyllm/``.

    >>> import os, kvpool
    >>> sorted(os.listdir(kvpool.get_include()))
    ['tinyllm', 'tinyllm.h']
    """
    return os.path.join(_ROOT, "include")


def get_library() -> str:
    """The shared library ``libtinyllm``, the same code that this package runs.

    Link a program with ``-L`` and ``-Wl,-rpath`` for its directory and ``-ltinyllm``.

    Raises ``FileNotFoundError`` when the package was built without it.

    >>> import kvpool
    >>> kvpool.get_library().endswith(("libtinyllm.so", "libtinyllm.dylib"))
    True
    """
    for name in ("libtinyllm.so", "libtinyllm.dylib"):
        path = os.path.join(_ROOT, "lib", name)
        if os.path.exists(path):
            return path
    raise FileNotFoundError(f"no libtinyllm in {os.path.join(_ROOT, 'lib')}")
