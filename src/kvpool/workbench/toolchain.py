"""The C compiler: finding it, asking what it can do, and building with it.

Everything is built under AddressSanitizer and UBSan at -O1: a bug that corrupts memory then fails
where it happens, and compiling one unit takes a third of a second.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from .objectcache import ObjectCache, reached_headers
from .process import run
from .trouble import Trouble

__all__ = ["BuildError", "Toolchain", "dependents", "n_jobs"]

_COMPILE_LIMIT_S = 120
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

# The counting allocator finds leaks through the library's hook; LeakSanitizer needs ptrace, which
# containers forbid. A request for more memory than there is has to fail, not to end the program.
SANITIZER_ENV = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:hard_rss_limit_mb=4096:color=never",
    "UBSAN_OPTIONS": "print_stacktrace=1:color=never",
}


class BuildError(Exception):
    """The compiler or the linker refused; ``text`` is what it said."""

    def __init__(self, step: str, text: str) -> None:
        super().__init__(f"{step}: {text.strip()[:2000]}")
        self.step, self.text = step, text


@dataclass(frozen=True)
class Toolchain:
    """A compiler command and the flags that go with every file."""

    cc: tuple[str, ...]
    sanitize: bool = True
    extra: tuple[str, ...] = ()
    version: str = ""
    cache: ObjectCache | None = None

    @property
    def flags(self) -> list[str]:
        base = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g1", "-fno-omit-frame-pointer", *self.extra]
        return [*base, *_SANITIZERS] if self.sanitize else base

    @property
    def env(self) -> dict[str, str]:
        """What a program built with this needs in its environment."""
        return dict(SANITIZER_ENV) if self.sanitize else {}

    def plain(self) -> Toolchain:
        """The same compiler without sanitizers."""
        return replace(self, sanitize=False)

    def compile(
        self, source: Path, out: Path, include: Sequence[Path], flags: Sequence[str] = ()
    ) -> str:
        """Compiles one file; returns the warnings. Raises :class:`BuildError`."""
        paths = [f"-I{path}" for path in include]
        words = [*self.cc, *self.flags, *flags]
        key = ""
        if self.cache is not None:
            key = self.cache.key([*words, self.version], source, include)
            if (warnings := self.cache.get(key, out)) is not None:
                return warnings
        command = [*words, *paths, "-c", str(source), "-o", str(out)]
        done = run(command, timeout_s=_COMPILE_LIMIT_S, merge=True, daemons=True)
        if done.code != 0:
            raise BuildError(f"compiling {source.name}", done.stdout or done.ending())
        if self.cache is not None:
            self.cache.put(key, out, done.stdout)
        return done.stdout

    def compile_all(
        self, sources: Iterable[Path], folder: Path, include: Sequence[Path]
    ) -> list[Path]:
        """Compiles files on all cores; the objects, in the order of the sources."""
        folder.mkdir(parents=True, exist_ok=True)

        def one(source: Path) -> Path:
            name = hashlib.sha256(str(source).encode()).hexdigest()[:8]
            out = folder / f"{source.stem}-{name}.o"
            self.compile(source, out, include)
            return out

        with ThreadPoolExecutor(n_jobs()) as pool:
            return list(pool.map(one, sources))

    def archive(self, objects: Sequence[Path], out: Path) -> Path:
        """A static library: of it, a program takes only what its own objects lack."""
        ar = shutil.which("ar")
        if ar is None:
            raise Trouble("there is no `ar` to make a library with", _install_hint("binutils"))
        out.unlink(missing_ok=True)
        done = run([ar, "rcs", out, *objects], timeout_s=_COMPILE_LIMIT_S, merge=True, daemons=True)
        if done.code != 0:
            raise BuildError(f"archiving {out.name}", done.stdout)
        return out

    def link(self, objects: Sequence[Path], out: Path, flags: Sequence[str] = ()) -> Path:
        """Links a program. Raises :class:`BuildError`."""
        command = [*self.cc, *self.flags, *flags, *map(str, objects), "-o", str(out), "-lm"]
        done = run([*command, "-lpthread"], timeout_s=_COMPILE_LIMIT_S, merge=True, daemons=True)
        if done.code != 0:
            raise BuildError(f"linking {out.name}", done.stdout or done.ending())
        return out


def find_toolchain(scratch: Path, *, sanitize: bool = True, cache: Path | None = None) -> Toolchain:
    """The compiler of this machine, tried out: ``$CC``, or the first of cc, gcc and clang.

    ``cache`` is a folder to keep objects in.

    Raises :class:`Trouble`, with what to install, when there is none, when it cannot build a
    program, or when the sanitizers' runtime is missing.
    """
    asked = os.environ.get("CC", "")
    names = [asked] if asked else ["cc", "gcc", "clang"]
    for name in names:
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            break
    else:
        looked = f"CC says {asked!r}, but" if asked else "looked for cc, gcc and clang:"
        raise Trouble(f"{looked} there is no C compiler here", _install_hint("gcc"))
    version = run([*words, "--version"], timeout_s=30, merge=True, daemons=True).stdout
    kept = None if cache is None else ObjectCache(cache)
    chain = Toolchain(tuple(words), sanitize=False, version=version, cache=kept)
    _try(chain, scratch, f"{name} cannot build a program", _install_hint("libc6-dev"))
    if sanitize:
        chain = replace(chain, sanitize=True)
        _try(
            chain,
            scratch,
            f"{name} has no AddressSanitizer and UBSan to build with",
            _install_hint("libasan and libubsan") + "; or give --no-sanitize to go on without them "
            "(memory errors may then go unseen)",
        )
    return chain


def _try(chain: Toolchain, scratch: Path, what: str, remedy: str) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    source = scratch / "try.c"
    source.write_text('#include <stdio.h>\nint main(void) { return puts("ok") < 0; }\n')
    try:
        chain.compile(source, scratch / "try.o", [])
        done = run([chain.link([scratch / "try.o"], scratch / "try")], timeout_s=30, env=chain.env)
    except BuildError as error:
        raise Trouble(f"{what}:\n{_head(error.text, 4)}", remedy) from None
    if done.code != 0:
        text = f"a program built with it does not run ({done.ending()})"
        raise Trouble(f"{what}: {text}\n{_head(done.stderr, 4)}", remedy)


def _head(text: str, n_lines: int) -> str:
    return "\n".join(text.strip().splitlines()[:n_lines])


def _install_hint(what: str) -> str:
    packages = {
        "gcc": "a C compiler",
        "libc6-dev": "the C library's headers",
        "binutils": "binutils",
    }
    return (
        f"install {packages.get(what, what)}: on Debian and Ubuntu `apt install build-essential`, "
        "on Fedora `dnf install gcc binutils libasan libubsan`, on macOS `xcode-select --install`"
    )


def n_jobs() -> int:
    """How many things to do at once: the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def dependents(changed: set[Path], units: Iterable[Path], include: Sequence[Path]) -> list[Path]:
    """The units that are, or include at any depth, one of the changed files (absolute paths)."""

    def reached(unit: Path) -> set[Path]:
        return {unit.resolve(), *(header for _, header in reached_headers(unit, include))}

    return [unit for unit in units if changed & reached(unit)]
