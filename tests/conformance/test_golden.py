"""The golden files and the transcription that writes them."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from conformance_support import CONFORMANCE, FORMATS, cases, kvwire

PAGE = (FORMATS / "kv-block.md").read_text()


def test_the_golden_files_are_what_the_transcription_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(CONFORMANCE / "golden.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_check_sees_a_changed_file(tmp_path: Path) -> None:
    copy = tmp_path
    shutil.copytree(CONFORMANCE, copy / "conformance")
    shutil.copytree(FORMATS, copy / "formats")
    victim = copy / "formats/golden/worked_example.tlkv"
    victim.write_bytes(victim.read_bytes()[:-1] + b"\0")
    (copy / "formats/golden-errors/no_entry.tlkv").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, str(copy / "conformance/golden.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "golden/worked_example.tlkv is not what" in done.stdout
    assert "no_entry.tlkv is no golden file" in done.stdout


def test_the_transcription_shares_nothing_with_the_package() -> None:
    source = (CONFORMANCE / "drivers/kvwire.py").read_text()
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module is not None
            modules.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("__import__", "eval", "exec")
    assert modules
    assert modules <= set(sys.stdlib_module_names)
    assert not modules & {"ctypes", "importlib", "subprocess", "zlib", "struct"}
    # And it runs where the package is not: no site-packages, no checkout on the path.
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(CONFORMANCE / "drivers/kvwire.py")],
        input="",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_transcription_is_laid_out_like_the_page() -> None:
    source = (CONFORMANCE / "drivers/kvwire.py").read_text()
    titles = {
        number: title.lower() for number, title in re.findall(r"^## (\d)\. (.*)$", PAGE, re.M)
    }
    sections = dict(re.findall(r"^# ---- (\d)\. (.*?) -+$", source, re.M))
    assert set(sections) == {"1", "2", "3"}
    for number, title in sections.items():
        assert title == titles[number]


def test_the_worked_example_is_the_page_to_the_byte() -> None:
    lines = re.findall(r"^((?:[0-9a-f]{2} +)+) {2,}\S", PAGE, re.M)
    on_the_page = bytes.fromhex("".join(lines))
    assert len(on_the_page) == 60
    [example] = [case for case in cases() if case["name"] == "worked_example"]
    assert example["envelope"] == on_the_page.hex()
    assert kvwire.block_hash(0, [1, 2]) == 0xA91AB0C1027B9366
    assert kvwire.block_hash(0xA91AB0C1027B9366, [3, 4]) == 0x03DF829571605C60
    assert kvwire.crc32c(b"123456789") == 0xE3069283
    assert kvwire.fnv1a64(b"a") == 0xAF63DC4C8601EC8C


def test_the_cases_are_those_that_users_meet() -> None:
    by_name = {case["name"]: case for case in cases()}
    assert len(by_name) >= 16

    def tail(case: dict[str, Any]) -> int:
        return int(len(case["tokens"]) % case["block_tokens"])

    all_cases = list(by_name.values())
    assert any(case["block_tokens"] == 1 for case in all_cases)
    assert any(len(case["tokens"]) == 1 for case in all_cases)
    assert any(tail(case) == 0 for case in all_cases)
    assert any(tail(case) == case["block_tokens"] - 1 > 1 for case in all_cases)
    assert any({0, 2**32 - 1} <= set(case["tokens"]) for case in all_cases)
    assert any(set(case["values"]) == {0} for case in all_cases)
    assert any({0x7C00, 0xFC00, 0x7C01, 0x7E00} <= set(case["values"]) for case in all_cases)
    assert any(set(case["values"]) == {0x8000} for case in all_cases)
    assert any(len(case["tokens"]) == 100 * case["block_tokens"] for case in all_cases)
    assert sum(case["n_layers"] > 1 and case["n_kv_heads"] > 1 for case in all_cases) >= 2


def test_two_names_of_one_case_never_meet() -> None:
    for case in cases():
        names = [b.block_hash for b in kvwire.blocks_of(case) if b.block_hash]
        assert len(names) == len(set(names)), case["name"]
