"""``kvpool tier``: what lower tiers hold, whether it is right, and moving it elsewhere."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvpool import InvalidArgument, KvPoolError, Unsupported
from kvpool.tiers import Key, RecordRefused, Tier, open_tier, verify_record

from ._envelopes import EXIT_BAD
from ._tables import print_table, progress, size_text

_BATCH = 16  # records in memory at a time
_COMMANDS = {
    "ls": ("show how many blocks a tier has, by layout and namespace", False),
    "stats": ("show what a tier holds, may hold and has counted", False),
    "verify": ("read every record and check all of it; the exit code is the verdict", True),
    "gc": ("delete what is damaged, and what is named", True),
    "copy": ("copy every record that is right to another tier", True),
}


def add_command(commands: Any) -> None:
    """Adds ``tier`` to the command line."""
    parser = commands.add_parser(
        "tier",
        help="look at lower tiers, check them, copy them",
        description="Lower tiers keep the blocks that pools evict (docs/tiers.md). Exit code: 0; 1 "
        "verify found records that are not right; 2 the tier could not be used.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    parsers = {}
    for name, (text, _) in _COMMANDS.items():
        parsers[name] = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        what = {"metavar": "FROM"} if name == "copy" else {"metavar": "URL"}
        parsers[name].add_argument("url", help="such as disk:/var/cache/kv.slab", **what)
    for name in ("ls", "stats", "verify"):
        parsers[name].add_argument("--json", action="store_true", help="one JSON document")
    parsers["ls"].add_argument("--keys", action="store_true", help="every key, one a line")
    parsers["gc"].add_argument(
        "--layout", action="append", default=[], metavar="HEX",
        help="delete all of this layout, as ls shows it; may be repeated",
    )  # fmt: skip
    parsers["gc"].add_argument(
        "--namespace", action="append", default=[], metavar="HEX", help="the same for a namespace"
    )
    parsers["gc"].add_argument("--dry-run", action="store_true", help="only say what would go")
    parsers["copy"].add_argument("to", metavar="TO", help="it may be new: disk:/path?size=20GiB")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Does one of the actions; the exit code."""
    with _open(args.url, create=False) as tier:
        code: int = globals()[f"_{args.action}"](args, tier)
        return code


def _open(url: str, *, create: bool) -> Tier:
    try:
        return open_tier(url, create=create)
    except ImportError as error:
        raise KvPoolError(str(error)) from error


def _keys(tier: Tier) -> list[Key]:
    return sorted(tier.keys(), key=lambda key: (key.layout, key.namespace, key.hash))


def _ls(args: argparse.Namespace, tier: Tier) -> int:
    keys = _keys(tier)
    if args.keys:
        for key in keys:
            print(key.text)
        return 0
    groups = Counter((key.layout.hex(), f"{key.namespace:016x}") for key in keys)
    if args.json:
        rows = [{"layout": a, "namespace": b, "blocks": n} for (a, b), n in groups.items()]
        print(json.dumps(rows))
        return 0
    rows_ = [(layout, namespace, f"{n:,}") for (layout, namespace), n in groups.items()]
    print_table(tier.name, ("layout", "namespace", "blocks"), rows_)
    return 0


def _stats(args: argparse.Namespace, tier: Tier) -> int:
    stats = tier.stats()
    if args.json:
        print(json.dumps({"name": tier.name, **vars(stats), "counts": dict(stats.counts)}))
        return 0
    rows = [
        ("records", "?" if stats.n_records is None else f"{stats.n_records:,}"),
        ("size", "?" if stats.size_bytes is None else size_text(stats.size_bytes)),
        ("capacity", "?" if stats.capacity_bytes is None else size_text(stats.capacity_bytes)),
        *((name, f"{n:,}") for name, n in sorted(stats.counts.items())),
    ]
    print_table(tier.name, ("", ""), rows)
    return 0


def _checked(
    tier: Tier, keys: Sequence[Key], what: str
) -> Iterator[tuple[Key, memoryview | None, str]]:
    """Every record, with what is wrong with it; None and why for one that is gone."""
    with progress(f"{what} {tier.name}", len(keys)) as advance:
        for at in range(0, len(keys), _BATCH):
            part = keys[at : at + _BATCH]
            for key, data in zip(part, tier.get(part), strict=True):
                if data is None:
                    yield key, None, "unreadable"
                    continue
                try:
                    verify_record(data, key)
                except RecordRefused as error:
                    yield key, memoryview(data), error.reason
                else:
                    yield key, memoryview(data), ""
            advance(at + len(part), at + len(part), "records")


def _verify(args: argparse.Namespace, tier: Tier) -> int:
    reasons: Counter[str] = Counter()
    bad = []
    for key, _, reason in _checked(tier, _keys(tier), "verifying"):
        reasons[reason] += 1
        if reason:
            bad.append((key, reason))
    right = reasons.pop("", 0)
    if args.json:
        rows = [{"key": key.text, "reason": reason} for key, reason in bad]
        print(json.dumps({"right": right, "wrong": rows}))
    else:
        for key, reason in bad:
            print(f"{key.text}: {reason}")
        print(f"{right:,} records are right, {len(bad):,} are not")
    return EXIT_BAD if bad else 0


def _named(option: str, texts: list[str]) -> set[int]:
    try:
        return {int(text, 16) for text in texts}
    except ValueError as error:
        raise InvalidArgument(f"{option}: expected hexadecimal digits ({error})") from None


def _gc(args: argparse.Namespace, tier: Tier) -> int:
    layouts = _named("--layout", args.layout)
    namespaces = _named("--namespace", args.namespace)
    keys = _keys(tier)
    named = [
        key
        for key in keys
        if int.from_bytes(key.layout, "big") in layouts or key.namespace in namespaces
    ]
    rest = sorted(set(keys) - set(named))
    bad = [key for key, _, reason in _checked(tier, rest, "checking") if reason]
    if not args.dry_run:
        tier.delete(named + bad)
    would = "would go" if args.dry_run else "deleted"
    left = len(keys) - len(named) - len(bad)
    print(f"{len(named):,} named and {len(bad):,} damaged records {would}, {left:,} stay")
    return 0


def _copy(args: argparse.Namespace, tier: Tier) -> int:
    n = kept = bad = 0
    keys = _keys(tier)
    try:
        with _open(args.to, create=True) as to:
            batch: list[tuple[Key, memoryview]] = []
            for key, record, reason in _checked(tier, keys, "copying"):
                n += 1
                if reason or record is None:
                    bad += 1
                    continue
                batch.append((key, record))
                if len(batch) == _BATCH or n == len(keys):
                    kept += sum(to.put(batch))
                    batch.clear()
            kept += sum(to.put(batch)) if batch else 0
            print(f"{kept:,} of {n:,} records are in {to.name}, {bad:,} were not right")
    except Unsupported as error:
        raise KvPoolError(f"copy: {error}") from error
    return 0
