"""What goes wrong with traces and with packages that are not there."""

from __future__ import annotations

from kvpool.errors import KvPoolError

__all__ = ["MissingPackage", "TraceError"]


class TraceError(KvPoolError, ValueError):
    """A line of a trace, a model's configuration or an option is not right; the text says where."""


class MissingPackage(KvPoolError, ImportError):
    """A package of the extra ``replay`` or ``plot`` is needed and not installed.

    >>> MissingPackage.of("msgspec", "JSON traces")
    MissingPackage("JSON traces need msgspec: pip install 'kvpool[replay]'")
    """

    @classmethod
    def of(cls, package: str, what: str, extra: str = "replay") -> MissingPackage:
        """The error for one package: what needs it, and how to get it."""
        return cls(f"{what} need {package}: pip install 'kvpool[{extra}]'")
