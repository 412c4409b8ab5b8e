"""What keeps `ol` from judging at all, and what to do about it."""

from __future__ import annotations

__all__ = ["EXIT_FAILED", "EXIT_OK", "EXIT_TROUBLE", "EXIT_USAGE", "Trouble", "UsageError"]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TROUBLE = 3


class Trouble(Exception):
    """No verdict is possible: ``what`` is wrong, and ``remedy`` is what to do."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


class UsageError(Exception):
    """The command line asks for something that is not there."""
