"""`ol parity`: the project's drivers agree, and every way to be a bad driver is told apart."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool.workbench import patches
from kvpool.workbench.assets import POOL_C, Assets
from kvpool.workbench.envelope import first_difference, place_of
from kvpool.workbench.parity import load_cases, own_drivers
from kvpool.workbench.process import run
from kvpool.workbench.toolchain import SANITIZER_ENV

from .workbench_support import Ol, OlJson, needs_compiler

# ---- the project's own drivers ------------------------------------------------------------------


@needs_compiler
def test_all_drivers_write_the_golden_envelopes_and_read_the_rest(
    ol_json: OlJson, tmp_path: Path
) -> None:
    code, document = ol_json("parity", "kv.wire.v1", "--dir", tmp_path)
    assert code == 0, document
    drivers = {driver["driver"]: driver for driver in document["drivers"]}
    assert set(drivers) == {"C", "Python", "Rust"}
    for name, driver in drivers.items():
        if name == "Rust" and shutil.which("rustc") is None:
            assert "no rustc" in driver["skipped"]
        else:
            assert driver["passed"], driver
            assert driver["cases"] > 80


@needs_compiler
def test_outside_a_workspace_it_says_that_nothing_of_yours_was_tested(
    ol: Ol, ol_json: OlJson, tmp_path: Path
) -> None:
    code, text = ol("parity", "kv.wire.v1", "--dir", tmp_path)
    assert code == 0, text
    first, *_, verdict = text.splitlines()
    assert first.startswith("Testing the reference's own drivers: no workspace here.")
    assert verdict == "PARITY of the reference's own drivers: no workspace here"
    _, document = ol_json("parity", "kv.wire.v1", "--dir", tmp_path)
    assert document["tested"] == "reference"


@needs_compiler
def test_in_a_workspace_the_learners_pool_is_driven(
    solved: Path, assets: Assets, ol: Ol, ol_json: OlJson
) -> None:
    code, document = ol_json("parity", "kv.wire.v1", "--dir", solved)
    assert code == 0, document
    assert [driver["driver"] for driver in document["drivers"]] == ["your kv_pool.c"]
    assert document["tested"] == "workspace"
    _, text = ol("parity", "kv.wire.v1", "--dir", solved)
    assert text.splitlines()[-1] == "PARITY"
    [patch] = patches.parse((assets.mutants / "rt.04/m02.patch").read_text())
    file = solved / POOL_C
    file.write_text(patches.apply(patch, file.read_text()))
    code, text = ol("parity", "kv.wire.v1", "--dir", solved)
    assert code == 1
    assert "NO PARITY" in text
    assert "TL_EFORMAT" in text  # its own reader refuses what it wrote
    file.write_text("not C")
    code, text = ol("parity", "kv.wire.v1", "--dir", solved)
    assert code == 1
    assert "it does not build" in text
    assert "error:" in text


# ---- bad drivers --------------------------------------------------------------------------------

PROLOGUE = """\
import json, sys
sys.path.insert(0, {drivers!r})
import kvwire
def answer(case):
    return bytes.fromhex(kvwire.answer_case(case)["hex"])
def say(data):
    print(json.dumps({{"hex": data.hex()}}), flush=True)
lines = [json.loads(line) for line in sys.stdin]
"""


@pytest.fixture
def driver(assets: Assets, tmp_path: Path) -> Any:
    """Makes a driver command from the code that follows the prologue above."""

    def make(code: str) -> str:
        script = tmp_path / "driver.py"
        folder = str(assets.conformance / "drivers")
        script.write_text(PROLOGUE.format(drivers=folder) + code)
        return shlex.join([sys.executable, str(script)])

    return make


def parity(ol: Ol, command: str, *more: str) -> tuple[int, str]:
    return ol("parity", "kv.wire.v1", "--driver", command, *more)


def test_a_good_driver_from_outside_passes(ol: Ol, driver: Any, assets: Assets) -> None:
    code, text = parity(ol, driver("for case in lines: say(answer(case))"))
    assert code == 0, text
    assert "byte for byte" in text
    python = shlex.join([sys.executable, str(assets.conformance / "drivers/kvwire.py")])
    code, text = parity(ol, python, "--read")
    assert code == 0, text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("d[0] = 0", "header field magic at offset 0: expected 54 4c 4b 56, found 00 4c 4b 56"),
        ("d[4] = 2", "header field version at offset 4: expected 1, found 2"),
        ("d[24] = 9", "header field head_dim at offset 24: expected 2, found 9"),
        ("d[28] ^= 1", "record 0, block_hash at offset 28: expected 0xa91ab0c1027b9366"),
        ("d[36] = 1", "record 0, n_tokens at offset 36: expected 2, found 1"),
        (
            "d[40] = 1",
            "record 0, layer 0 K head 0 position 0 dim 0 at offset 40: expected 0x3c00 (1), "
            "found 0x3c01",
        ),
        ("d[51] = 0", "record 0, layer 0 V head 0 position 0 dim 1 at offset 50"),
        ("d[56] ^= 255", "crc32c at offset 56: expected 0x4f0b541c"),
        ("del d[50:]", "record 0, layer 0 V head 0 position 0 dim 1 at offset 50: expected 0xbc00"),
        ("d += b'x'", "length at offset 60: expected 60 bytes, found 61 bytes"),
    ],
)
def test_the_first_difference_is_named(ol: Ol, driver: Any, change: str, told: str) -> None:
    code, text = parity(
        ol,
        driver(
            "for case in lines:\n"
            "    d = bytearray(answer(case))\n"
            "    if case['name'] == 'worked_example':\n"
            f"        {change}\n"
            "    say(d)"
        ),
    )
    assert code == 1
    assert f"worked_example: {told}" in " ".join(text.split())
    assert "1 of " in text


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('not json')\nfor case in lines[1:]: say(answer(case))", "no JSON object"),
        ("for case in lines: print('[1]')", "no JSON object"),
        ("for case in lines: print(json.dumps({'hex': 7}))", 'no {"hex": ...}'),
        ("for case in lines: print(json.dumps({'hex': 'zz'}))", 'no {"hex": ...}'),
        ("for case in lines[:3]: say(answer(case))\nraise SystemExit('gave up')", "gave up"),
        ("for case in lines[:3]: say(answer(case))\nimport os\nos.abort()", "SIGABRT"),
        ("for case in lines[:3]: say(answer(case))", "no answer"),
        ("for case in lines: say(answer(case))\nprint('bye')", "lines for"),
        ("for case in lines: say(answer(case))\nsys.exit(4)", "exit code 4"),
    ],
)
def test_rubbish_and_death_are_failures_of_the_driver(
    ol: Ol, driver: Any, code: str, told: str
) -> None:
    exit_code, text = parity(ol, driver(code))
    assert exit_code == 1
    assert told in text


def test_a_driver_that_hangs_is_ended_and_keeps_what_it_answered(
    ol_json: OlJson, driver: Any
) -> None:
    command = driver(
        "for case in lines[:3]: say(answer(case))\n"
        "print('thinking', file=sys.stderr, flush=True)\n"
        "while True: pass"
    )
    code, document = ol_json("parity", "kv.wire.v1", "--driver", command, "--timeout", "3")
    assert code == 1
    [report] = document["drivers"]
    assert "no end after 3 s" in report["ending"]
    assert report["stderr"] == "thinking"
    assert len(report["failures"]) == report["cases"] - 3


def test_a_driver_that_is_not_there_is_said_so(ol: Ol) -> None:
    code, text = parity(ol, "/no/such/driver")
    assert code == 1
    assert "cannot be started" in text


def test_a_reader_that_accepts_everything_fails(ol: Ol, driver: Any) -> None:
    command = driver(
        "for case in lines:\n"
        "    if 'hex' in case: print(json.dumps({'status': 'TL_OK'}))\n"
        "    else: say(answer(case))"
    )
    assert parity(ol, command)[0] == 0
    code, text = parity(ol, command, "--read")
    assert code == 1
    assert "version_2.tlkv: read as TL_OK, must be TL_EFORMAT (a later version)" in text


def test_one_bad_driver_of_two_is_no_parity(ol_json: OlJson, driver: Any) -> None:
    good = driver("for case in lines: say(answer(case))")
    code, document = ol_json(
        "parity", "kv.wire.v1", "--driver", good, "--driver", "/no/such/driver"
    )
    assert code == 1
    assert [report["passed"] for report in document["drivers"]] == [True, False]


# ---- the C driver's reader of JSON --------------------------------------------------------------


CASE = {
    "block_tokens": 1, "n_layers": 1, "n_kv_heads": 1, "head_dim": 1, "tokens": [1],
    "values": [1, 2],
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1]",
        '{"name": "x"',
        '{"name": "x"} trailing',
        json.dumps({**CASE, "block_tokens": 0, "tokens": [], "values": []}),
        '{"block_tokens": -1}',
        '{"block_tokens": 1.5}',
        '{"block_tokens": 1e3}',
        '{"block_tokens": 01}',
        '{"block_tokens": 4294967296}',
        '{"block_tokens": 99999999999999999999999999}',
        '{"block_tokens": 1, "block_tokens": 1}',
        '{"surprise": 1}',
        '{"name": "a\\u0041"}',
        '{"name": "no end}',
        '{"values": [65536]}',
        '{"values": [1,]}',
        '{"tokens": [[1]]}',
        json.dumps({**CASE, "values": [1]}),
        json.dumps({**CASE, "n_layers": 2**32 - 1, "n_kv_heads": 2**32 - 1}),
    ],
)  # fmt: skip
def test_the_c_driver_refuses_what_is_no_case(c_driver: Path, line: str) -> None:
    done = run([c_driver], timeout_s=20, stdin=(line + "\n").encode(), env=SANITIZER_ENV)
    assert done.code == 2, done.stderr
    assert done.stderr.startswith("driver: ")
    assert done.stdout == ""


@needs_compiler
def test_the_c_driver_takes_the_case_that_the_bad_ones_are_made_from(c_driver: Path) -> None:
    done = run([c_driver], timeout_s=20, stdin=json.dumps(CASE).encode(), env=SANITIZER_ENV)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["hex"].startswith("544c4b56")


@pytest.fixture(scope="module")
def c_driver(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    return Path(own_drivers(assets, folder, None)[0].command[0])


# ---- naming a byte ------------------------------------------------------------------------------


def test_every_byte_of_every_golden_envelope_has_a_name(assets: Assets) -> None:
    for case in load_cases(assets):
        golden = bytes.fromhex(case["envelope"])
        names = set()
        for offset in range(len(golden)):
            place = place_of(golden, offset)
            assert place.offset <= offset < place.offset + place.n_bytes
            names.add(place.field)
        n = -(-len(case["tokens"]) // case["block_tokens"])
        values = case["n_layers"] * 2 * case["n_kv_heads"] * case["block_tokens"] * case["head_dim"]
        assert len(names) == 8 + n * (2 + values) + 1, case["name"]
        assert first_difference(golden, golden) is None


def test_the_suite_gives_drivers_neither_the_envelope_nor_the_reason(
    ol: Ol, driver: Any, tmp_path: Path
) -> None:
    seen = tmp_path / "seen.json"
    parity(ol, driver(f"open({str(seen)!r}, 'w').write(json.dumps(sorted(lines[0])))"))
    keys = json.loads(seen.read_text())
    assert keys == [
        "block_tokens", "head_dim", "n_kv_heads", "n_layers", "name", "tokens", "values",
    ]  # fmt: skip
