"""Generates src/kvpool/_core.pyi from the compiled module, or checks that it is up to date.

    python scripts/stub.py            writes the stub
    python scripts/stub.py --check    exit code 1, and a diff, when it is not the committed one

Needs an installed kvpool and nanobind's generator. Signatures come from nb::sig in binding/, the
overloads from binding/stub_patterns.txt.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from nanobind.stubgen import StubGen, load_pattern_file

import kvpool._core

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "src" / "kvpool" / "_core.pyi"
PATTERNS = ROOT / "binding" / "stub_patterns.txt"


def generate() -> str:
    patterns = load_pattern_file(str(PATTERNS))
    generator = StubGen(
        module=kvpool._core,
        include_docstrings=True,
        include_private=True,
        patterns=patterns,
        quiet=True,
    )
    generator.put(kvpool._core)
    text = generator.get()
    unused = [p.query.pattern for p in patterns if p.matches == 0]
    if unused:
        raise SystemExit(f"patterns that match nothing: {unused}")
    # An int's value may change with the build; its type may not.
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    text = generate()
    if not args.check:
        STUB.write_text(text)
        return 0
    committed = STUB.read_text() if STUB.exists() else ""
    diff = list(
        difflib.unified_diff(
            committed.splitlines(), text.splitlines(), "committed", "generated", lineterm=""
        )
    )
    print("\n".join(diff) if diff else f"{STUB.relative_to(ROOT)} is up to date")
    return 1 if diff else 0


if __name__ == "__main__":
    sys.exit(main())
