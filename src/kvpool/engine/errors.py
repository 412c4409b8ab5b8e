"""What goes wrong before a token is computed: no model, a foreign model, a package that is missing.

::

    kvpool.KvPoolError
     +-- EngineError              the base of this module's errors
          +-- ModelFileError      (ValueError) no file, no GGUF, damaged, or not a Llama
          +-- MissingPackage      (ImportError) an optional package is not installed

A pool without enough blocks is :class:`kvpool.PoolFull`, as everywhere else.
"""

from __future__ import annotations

from kvpool import KvPoolError

__all__ = ["EngineError", "MissingPackage", "ModelFileError"]


class EngineError(KvPoolError):
    """The base of the engine's own errors; its text is one line, ready to be shown."""


class ModelFileError(EngineError, ValueError):
    """The file is missing, is no GGUF, is damaged, or holds a model this engine does not run."""


class MissingPackage(EngineError, ImportError):
    """A package of the ``model`` extra is not installed.

    >>> print(MissingPackage.named("rich.box"))
    the package 'rich' is missing: pip install 'kvpool[model]'
    """

    @classmethod
    def named(cls, module: str | None) -> MissingPackage:
        """The error for the package of one module, as ``ImportError.name`` has it."""
        package = (module or "?").partition(".")[0]
        return cls(f"the package {package!r} is missing: pip install 'kvpool[model]'")
