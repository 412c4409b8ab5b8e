"""The engine over lower tiers: a cold process goes on from the disk; no tier changes a token."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvpool
from kvpool.cli import main
from kvpool.engine.generate import generate
from kvpool.tiers import TierStack

sys.path.append(str(Path(__file__).resolve().parent.parent / "tiers"))
from tier_support import Faulty

PROMPT = list(range(3, 90))


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def cold(*args: str) -> Done:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "kvpool", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process, which starts sooner."""

    def call(*args: str) -> Done:
        try:
            code = main(args)
        except SystemExit as error:
            code = int(error.code or 0)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny_llama import TinyLlama

    weights = TinyLlama(n_layers=2, context_length=100_000, eos=False)
    return str(weights.write(tmp_path_factory.mktemp("tiers") / "tiny.gguf"))


def test_a_cold_process_answers_from_the_disk_with_the_same_tokens(
    model: str, tmp_path: Path, run: Callable[..., Done]
) -> None:
    prompts = [f"a question that begins as the others do, and then ends with {i}" for i in "12"]
    asked = ("generate", "--model", model, "--json", "--max-tokens", "20", "--block-tokens", "8")
    texts = tuple(part for text in prompts for part in ("--prompt", text))
    url = f"disk:{tmp_path}/kv.slab?size=4MiB"

    def answer(*more: str, run: Callable[..., Done] = cold) -> dict[str, Any]:
        done = run(*asked, *texts, *more)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def tokens(document: dict[str, Any]) -> list[list[int]]:
        return [sample["tokens"] for prompt in document["prompts"] for sample in prompt["samples"]]

    plain, first, second = answer(), answer("--tier", url), answer("--tier", url)
    assert "tiers" not in plain
    assert tokens(first) == tokens(plain)
    assert tokens(second) == tokens(plain)
    [first_tier], [warm] = first["tiers"], second["tiers"]
    assert first_tier["hits"] == 0
    assert first_tier["stored"] > 10
    assert warm["hits"] >= 10
    assert warm["refused"] == {}
    assert second["total"]["cached_tokens"] > first["total"]["cached_tokens"]
    every = sum(prompt["prompt_tokens"] - 1 for prompt in second["prompts"])
    assert second["total"]["cached_tokens"] > 0.9 * every - 16

    shown = run(*(part for part in asked if part != "--json"), *texts, "--tier", url)
    assert f"disk:{tmp_path}/kv.slab: " in shown.stdout
    assert " blocks found (" in shown.stdout

    listed = json.loads(run("tier", "ls", "--json", url).stdout)
    assert [row["namespace"] for row in listed] == ["0" * 16]
    keys = run("tier", "ls", "--keys", url).stdout.splitlines()
    assert len(keys) == listed[0]["blocks"]
    assert all(key.startswith(f"tlkv1-{listed[0]['layout']}-") for key in keys)
    stats = json.loads(run("tier", "stats", "--json", url).stdout)
    assert stats["n_records"] == len(keys)
    assert stats["capacity_bytes"] <= 4 << 20

    other = f"disk:{tmp_path}/copy.slab?size=4MiB"
    assert f"{len(keys)} of {len(keys)} records are in" in run("tier", "copy", url, other).stdout
    third = answer("--tier", other, run=run)
    assert tokens(third) == tokens(plain)
    assert third["tiers"][0]["hits"] == warm["hits"]

    # Another model file, and be it one bit of it: nothing of the first one's is found.
    changed = Path(model).with_name("changed.gguf")
    data = bytearray(Path(model).read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    done = run(*asked[:1], "--model", str(changed), *asked[3:], *texts, "--tier", url)
    assert json.loads(done.stdout)["tiers"][0]["hits"] == 0


def test_tier_verify_and_gc_find_what_is_damaged(
    model: str, tmp_path: Path, run: Callable[..., Done]
) -> None:
    url = f"disk:{tmp_path}/kv.slab?size=1MiB"
    done = run("generate", "--model", model, "--prompt", "a question", "--tier", url)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(run("tier", "ls", "--json", url).stdout)
    n = row["blocks"]
    assert n >= 4
    fine = run("tier", "verify", url)
    assert fine.returncode == 0
    assert fine.stdout == f"{n} records are right, 0 are not\n"

    from kvpool.tiers.disk import DiskTier

    with DiskTier(tmp_path / "kv.slab") as tier:
        at = tier._slot_at(2) + 1000
    with (tmp_path / "kv.slab").open("r+b") as file:
        file.seek(at)
        file.write(b"rot")
    wrong = run("tier", "verify", url)
    assert wrong.returncode == 1
    assert wrong.stdout.endswith(f"{n - 1} records are right, 1 are not\n")
    assert ": envelope\n" in wrong.stdout
    verdict = json.loads(run("tier", "verify", "--json", url).stdout)
    assert verdict["right"] == n - 1
    assert [row["reason"] for row in verdict["wrong"]] == ["envelope"]

    dry = run("tier", "gc", "--dry-run", url).stdout
    assert dry == f"0 named and 1 damaged records would go, {n - 1} stay\n"
    assert run("tier", "gc", url).stdout == f"0 named and 1 damaged records deleted, {n - 1} stay\n"
    assert run("tier", "verify", url).returncode == 0
    gone = run("tier", "gc", "--layout", row["layout"], url).stdout
    assert gone == f"{n - 1} named and 0 damaged records deleted, 0 stay\n"


def test_tier_tells_what_it_cannot_use_in_one_line(
    tmp_path: Path, run: Callable[..., Done]
) -> None:
    for args, text in (
        (("ls", f"disk:{tmp_path}/nowhere"), "No such file or directory"),
        (("ls", "tape:/x"), "expected a URL of"),
        (("gc", "memory:", "--layout", "xyz"), "--layout: expected hexadecimal digits"),
        (("stats",), "the following arguments are required: URL"),
    ):
        done = run("tier", *args)
        assert done.returncode == 2
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "nowhere").exists()


# ---- a tier changes nothing ----------------------------------------------------------------------


def flip(records: list[Any]) -> list[Any]:
    changed = []
    for record in records:
        if record is not None:
            record = bytearray(record)
            record[random.randrange(len(record))] ^= 0x40
        changed.append(record)
    return changed


def raising(*args: object) -> Any:
    raise RuntimeError("the tier is broken")


HANG = threading.Event()
FAULTS = {
    "right": lambda keys, records: records,
    "lies": lambda keys, records: flip(records),
    "mixes up": lambda keys, records: records[::-1],
    "zeros": lambda keys, records: [record and bytes(len(record)) for record in records],
    "fails": raising,
    "hangs": lambda keys, records: (HANG.wait(20), records)[1],
    "is slow": lambda keys, records: (time.sleep(0.03), records)[1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_tier_changes_a_token(tiny, fault: str) -> None:
    """Answers with sampling; between any two the pool loses all that it has cached."""
    random.seed(fault)
    options = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "n": 2}
    prompts = [PROMPT, PROMPT[:50] + [7] * 30, PROMPT, PROMPT[:64]]

    def answers(manager: kvpool.BlockManager) -> list[list[int]]:
        found = []
        for prompt in prompts:
            request = generate(tiny.model, manager, prompt, **options)
            found.append([sample.tokens for sample in request.samples])
            manager.evict(np.arange(manager.pool.n_blocks))
        return found

    with kvpool.BlockManager(tiny.pool(20)) as plain:
        expected = answers(plain)
    tier = Faulty(1 << 24)
    stack = TierStack([tier], model="tiny", timeout_s=20, close_timeout_s=0.2)
    with kvpool.BlockManager(tiny.pool(20), tiers=stack) as manager:
        assert answers(manager) == expected
        assert stack.flush(20)
        before = stack.stats()[0].hits
        tier.on_get = FAULTS[fault]
        [level] = stack._levels
        level._blocked_until = 0.0
        stack.timeout_s = 20 if fault in ("right", "is slow") else 0.05
        assert answers(manager) == expected
        stats = stack.stats()[0]
        if fault != "mixes up":  # a batch of one is right backwards, too
            assert (stats.hits > before) == (fault in ("right", "is slow"))
        if fault in ("lies", "zeros"):
            assert sum(stats.refused.values()) > 0
        if fault == "fails":
            assert "broken" in stats.last_error
        if fault == "hangs":
            assert stats.timeouts > 0
            HANG.set()
        assert manager.pool.stats.used == 0
        manager.check()
