"""Compares figures with the committed baselines of the same names.

    python benchmarks/compare.py build/bench [--tolerance 1.5] [--check]

Reads every FOLDER/NAME.json that has a benchmarks/baselines/NAME.json; both hold
``{figure: {"value": number, "unit": text}}``. Prints the ratio of now to the baseline, above 1 for
worse, and marks what is worse than the tolerance; with --check those make exit code 1. Another
machine, or other programs on this one, move all figures together: ``empty_call`` shows by how much.
A baseline changes by copying the new file over it, in a commit that says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

BASELINES = Path(__file__).parent / "baselines"
MORE_IS_BETTER = {"GB/s"}


def figures(path: Path) -> dict[str, dict[str, Any]]:
    data = json.loads(path.read_text())
    return {k: v for k, v in data.items() if isinstance(v, dict) and "value" in v}


def worse_by(now: dict[str, Any], then: dict[str, Any]) -> float:
    a, b = float(now["value"]), float(then["value"])
    if now["unit"] in MORE_IS_BETTER:
        a, b = b, a
    return a / b if b else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tolerance", type=float, default=1.5)
    parser.add_argument("--check", action="store_true", help="exit code 1 when something is worse")
    args = parser.parse_args()
    n_worse = 0
    for path in sorted(args.folder.glob("*.json")):
        if not (BASELINES / path.name).exists():
            continue
        now, then = figures(path), figures(BASELINES / path.name)
        print(f"{path.stem}: now, baseline, ratio (above 1 is worse)")
        for name in now.keys() & then.keys():
            assert now[name]["unit"] == then[name]["unit"], name
        for name in [n for n in now if n in then]:
            ratio = worse_by(now[name], then[name])
            n_worse += ratio > args.tolerance
            mark = "  WORSE" if ratio > args.tolerance else ""
            print(
                f"  {name:<34}{now[name]['value']:>12.2f}{then[name]['value']:>12.2f} "
                f"{now[name]['unit']:<6}{ratio:>6.2f}{mark}"
            )
        for name in sorted(then.keys() - now.keys()):
            print(f"  {name:<34} is in the baseline only")
    return 1 if args.check and n_worse else 0


if __name__ == "__main__":
    sys.exit(main())
