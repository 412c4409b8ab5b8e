"""Tiers by URL: ``disk:/var/cache/kv?size=10GiB``, ``memory:?size=1GiB``, ``valkey://host:6379``.

A scheme names a function in a module of this package, which is imported when the scheme is used and
not before: so are the client libraries. The function gets the URL, split, and its options.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvpool import InvalidArgument

from .tier import MemoryTier, Tier

__all__ = ["SCHEMES", "Options", "open_tier", "port", "shown"]

#: Which module of this package opens a scheme, with its ``open_url(url, options)``.
SCHEMES = MappingProxyType(
    {
        "disk": "disk",
        "memory": "registry",
        "mooncake": "mooncake",
        "redis": "valkey",
        "rediss": "valkey",
        "s3": "s3",
        "valkey": "valkey",
        "valkeys": "valkey",
    }
)

_MOST_BYTES = 1 << 63  # what a file's length is counted in ends here
_UNITS = {"": 1, "b": 1}
for _i, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_i, f"{_letter}ib": 1024**_i, f"{_letter}b": 1000**_i}


class Options:
    """The options of a URL, each taken once; ``done`` refuses the ones that nobody took.

    >>> options = Options("disk", {"size": "2GiB", "sync": "batch"})
    >>> options.size("size"), options.choice("sync", "none", ("none", "batch"))
    (2147483648, 'batch')
    >>> options.done()
    """

    def __init__(self, scheme: str, values: dict[str, str], *, create: bool = True) -> None:
        self._scheme, self._values = scheme, dict(values)
        self._known: list[str] = []
        self.create = create
        """Whether a store that is not there is made; the tools only look."""

    def text(self, name: str, default: str = "") -> str:
        """The option as it is."""
        self._known.append(name)
        return self._values.pop(name, default)

    def _value(self, name: str, default: Any, read: Callable[[str], Any], expected: str) -> Any:
        text = self.text(name)
        if not text:
            return default
        try:
            return read(text)
        except (KeyError, ValueError, OverflowError):
            raise InvalidArgument(
                f"{self._scheme}: {name}: expected {expected}, found {text!r}"
            ) from None

    def size(self, name: str, default: int | None = None) -> int | None:
        """Bytes: a number, with kB, MB, GB, TB, KiB, MiB, GiB or TiB perhaps."""

        def read(text: str) -> int:
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
            if match is None:
                raise ValueError
            n = int(float(match[1]) * _UNITS[match[2].lower()])
            if n >= _MOST_BYTES:
                raise ValueError
            return n

        size: int | None = self._value(name, default, read, "a size, like 10GiB")
        return size

    def seconds(self, name: str, default: float) -> float:
        """A time."""
        seconds: float = self._value(name, default, float, "seconds")
        return seconds

    def integer(self, name: str, default: int) -> int:
        """A number."""
        number: int = self._value(name, default, int, "a whole number")
        return number

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """One of some words."""
        text = self.text(name, default)
        if text not in choices:
            raise InvalidArgument(
                f"{self._scheme}: {name}: expected {' or '.join(choices)}, found {text!r}"
            )
        return text

    def flag(self, name: str, default: bool = False) -> bool:
        """Yes or no."""
        words = {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}
        flag: bool = self._value(name, default, lambda text: words[text.lower()], "yes or no")
        return flag

    def done(self) -> None:
        """Refuses what is left."""
        if self._values:
            raise InvalidArgument(
                f"{self._scheme}: unknown option {', '.join(sorted(self._values))}; it has "
                f"{', '.join(self._known) or 'none'}"
            )


def shown(url: str) -> str:
    """A URL, or the end of one, as it may be printed: a user and a password are left out, also
    where the URL is so wrong that nobody can tell which part they are.

    >>> shown("valky://me:secret@10.0.0.7/0"), shown("disk:/var/kv.slab")
    ('valky://***@10.0.0.7/0', 'disk:/var/kv.slab')
    """
    return re.sub(r"^((?:[A-Za-z0-9+.-]+:)?/*).*@", r"\1***@", url, flags=re.DOTALL)


def port(scheme: str, text: str | None, default: int) -> int:
    """The port that a URL names. InvalidArgument."""
    number = int(text or default)
    if not 0 < number < 1 << 16:
        raise InvalidArgument(f"{scheme}: port: expected 1 to 65535, found {number}")
    return number


def open_tier(url: str, *, create: bool = True) -> Tier:
    """The tier that a URL names; ``create`` False: only if it is there (disk).

    Raises InvalidArgument: an unknown scheme, a wrong option; ImportError: the scheme's client
    library is not installed, and what to install; and whatever opening the store raises.

    >>> open_tier("memory:?size=1MiB").stats().capacity_bytes
    1048576
    >>> open_tier("tape:1")
    Traceback (most recent call last):
    kvpool.errors.InvalidArgument: tier: expected a URL of disk:, memory:..., found 'tape:1'
    """
    try:
        split = urlsplit(url)
    except ValueError:  # whose text has the password in it
        raise InvalidArgument(f"tier: expected a URL, found {shown(url)!r}") from None
    if split.scheme not in SCHEMES:
        schemes = ", ".join(f"{scheme}:" for scheme in SCHEMES)
        raise InvalidArgument(f"tier: expected a URL of {schemes}, found {shown(url)!r}")
    if "#" in url:
        raise InvalidArgument(f"tier: # is written %23 in a URL, found {shown(url)!r}")
    try:
        pairs = parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query))
    except ValueError:
        raise InvalidArgument(f"tier: options are ?name=value&..., found {shown(url)!r}") from None
    if len(dict(pairs)) < len(pairs):
        raise InvalidArgument(f"tier: an option is there twice in {shown(url)!r}")
    options = Options(split.scheme, dict(pairs), create=create)
    module = importlib.import_module(f".{SCHEMES[split.scheme]}", __package__)
    tier: Tier = module.open_url(split, options)
    return tier


def open_url(url: SplitResult, options: Options) -> Tier:
    """``memory:?size=1GiB``."""
    size = options.size("size", 1 << 30)
    options.done()
    return MemoryTier(size or 0)
