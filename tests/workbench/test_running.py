"""Programs that hang, flood, crash and fork, and what is understood of a test program's output."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from kvpool.workbench.assets import Assets
from kvpool.workbench.catalog import read_catalog
from kvpool.workbench.mutation import Workshop
from kvpool.workbench.objectcache import ObjectCache, reached_headers
from kvpool.workbench.process import run
from kvpool.workbench.testprogram import Outcome, run_tests
from kvpool.workbench.toolchain import BuildError, find_toolchain

from .workbench_support import needs_compiler


def python(code: str) -> list[str | Path]:
    return [sys.executable, "-c", code]


# ---- process ------------------------------------------------------------------------------------


def test_input_goes_in_and_both_outputs_come_out() -> None:
    code = (
        "import sys; print(sys.stdin.read().upper()); print('aside', file=sys.stderr); sys.exit(3)"
    )
    done = run(python(code), timeout_s=20, stdin=b"words")
    assert (done.stdout, done.stderr, done.code) == ("WORDS\n", "aside\n", 3)
    assert done.ending() == "exit code 3"


def test_a_program_that_hangs_is_killed_with_its_children() -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"
    start = time.monotonic()
    done = run(python(code), timeout_s=1)
    assert done.timed_out
    assert time.monotonic() - start < 10
    assert "no end after 1 s" in done.ending()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_a_child_that_left_the_group_is_killed_too(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "time.sleep(60)"
    )
    done = run(python(code), timeout_s=50, on_line=lambda line: line == "ready")
    assert done.seconds < 4  # it held our pipe
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state not in "ZX"


def test_a_flood_is_cut() -> None:
    done = run(python("while True: print('x' * 100000)"), timeout_s=60)
    assert done.flooded
    assert not done.timed_out
    assert len(done.stdout) <= 16 << 20
    assert "MiB of output" in done.ending()


def test_a_program_that_reads_nothing_does_not_block_us() -> None:
    done = run(python("print('done')"), timeout_s=20, stdin=b"x" * (1 << 22))
    assert (done.stdout, done.code) == ("done\n", 0)


def test_a_signal_has_its_name() -> None:
    done = run(python("import os; os.kill(os.getpid(), 11)"), timeout_s=20)
    assert done.ending() == "killed by SIGSEGV"


def test_lines_are_seen_as_they_come_and_can_stop_the_program() -> None:
    seen: list[str] = []

    def see(line: str) -> bool:
        seen.append(line)
        return line == "two"

    code = "import time\nfor w in ['one', 'two']: print(w, flush=True)\ntime.sleep(60)"
    done = run(python(code), timeout_s=50, on_line=see)
    assert seen == ["one", "two"]
    assert done.seconds < 40


# ---- a test program's output --------------------------------------------------------------------


def outcome(text: str) -> Outcome:
    return Outcome("t", "failed", 1.0, text)


def test_a_failed_check_is_the_headline_and_its_context_a_detail() -> None:
    failure = outcome(
        "/a/b/test_x.c:12: n is 3 (0x3), but 4 is 4 (0x4)\n    with --seed 7"
    ).failure()
    assert failure.headline == "test_x.c:12: n is 3 (0x3), but 4 is 4 (0x4)"
    assert failure.details == ("with --seed 7",)


def test_a_sanitizer_report_is_reduced_to_the_frames_of_the_file() -> None:
    text = """\
=================================================================
==1==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602 at pc 0x4 bp 0x7 sp 0x7
WRITE of size 1 at 0x602 thread T0
    #0 0x401 in helper /tmp/lib.c:9
    #1 0x402 in tl_kv_unref /home/me/c/src/runtime/kv_pool.c:120
    #2 0x403 in test /data/test_kv_pool.c:33
    the process ended with code 1"""
    failure = outcome(text).failure("kv_pool.c")
    assert failure.headline == "AddressSanitizer: heap-buffer-overflow"
    assert failure.details == ("in tl_kv_unref, kv_pool.c:120",)
    assert outcome(text).failure("other.c").details == ("in helper, lib.c:9",)


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        ("    no end after 5 s", "no end after 5 s: a loop"),
        ("    killed by signal 11 (Segmentation fault)", "killed by signal 11"),
        ("/x/kv_pool.c:7:9: runtime error: shift exponent 64", "UBSan: shift exponent 64 at kv_p"),
        ("", "without saying why"),
    ],
)
def test_other_ends_have_words_too(text: str, headline: str) -> None:
    assert headline in outcome(text).failure("kv_pool.c").headline


# ---- real test programs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("workshop")
    chain = find_toolchain(folder / "try", cache=folder / "cache")
    return Workshop(assets, chain, folder, assets.pool_units)


@needs_compiler
def test_the_catalogue_read_from_the_source_is_that_of_the_program(
    workshop: Workshop, assets: Assets
) -> None:
    suite = workshop.suite("rt04", [assets.chapter_test])
    entries = read_catalog(assets.chapter_test)
    assert list(suite.tests) == [entry.name for entry in entries]
    program = workshop.folder / "suite-rt04/reference"
    printed = run([program, "--catalog"], timeout_s=20, env=workshop.chain.env)
    assert json.loads(printed.stdout) == [entry.as_json() for entry in entries]


TESTS = """
#include "tl_test.h"
#include <stdlib.h>
TL_TEST(good) { TL_EQ(1, 1); }
TL_TEST(bad) { TL_EQ(2, 3); }
TL_TEST(crash) { abort(); }
TL_TEST(silent) { _Exit(0); }
TL_TEST(hang) { for (volatile int i = 0; i == 0;) {} }
"""


@needs_compiler
def test_every_kind_of_test_has_its_outcome(workshop: Workshop, tmp_path: Path) -> None:
    source = tmp_path / "kinds.c"
    source.write_text(TESTS)
    suite = workshop.suite("kinds", [source])
    assert suite.tests == ("good", "bad", "crash", "silent", "hang")
    program = workshop.folder / "suite-kinds/reference"
    result = run_tests(program, test_limit_s=1, env=workshop.chain.env)
    assert not result.passed
    assert result.failed_names == {"bad", "crash", "hang"}
    assert result.hung
    assert run_tests(program, names=["good"], env=workshop.chain.env).passed


@needs_compiler
def test_tests_that_the_program_did_not_reach_are_missing(
    workshop: Workshop, tmp_path: Path
) -> None:
    source = tmp_path / "dies.c"
    source.write_text(
        '#include "tl_test.h"\n#include <stdlib.h>\n'
        "TL_TEST(first) { TL_EQ(1, 1); }\nTL_TEST(second) { exit(0); }\nTL_TEST(third) {}\n"
    )
    workshop.suite("dies", [source])
    program = workshop.folder / "suite-dies/reference"
    result = run_tests(program, env=workshop.chain.env, isolate=False)
    assert [test.name for test in result.tests] == ["first"]
    assert result.missing == ["second", "third"]
    assert not result.passed  # although the program's exit code is 0


@needs_compiler
def test_a_source_that_does_not_compile_is_a_build_error(
    workshop: Workshop, tmp_path: Path
) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int f(void) { return }\n")
    with pytest.raises(BuildError, match="expected expression"):
        workshop.chain.compile(source, tmp_path / "broken.o", [])


# ---- the cache of objects -----------------------------------------------------------------------


def test_headers_are_found_at_any_depth_and_in_the_compilers_order(tmp_path: Path) -> None:
    for name, text in {
        "near/a.c": '#include "b.h"\n#include <stdio.h>\n',
        "near/b.h": '  #  include "sub/c.h"\n',
        "first/sub/c.h": "",
        "second/sub/c.h": '#include "b.h"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    include = [tmp_path / "first", tmp_path / "second"]
    found = {path for _, path in reached_headers(tmp_path / "near/a.c", include)}
    assert found == {
        (tmp_path / "near/b.h").resolve(),
        (tmp_path / "first/sub/c.h").resolve(),
    }


def test_an_object_is_kept_for_equal_inputs_only(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "cache")
    source, header = tmp_path / "a.c", tmp_path / "a.h"
    source.write_text('#include "a.h"\n')
    header.write_text("int x;\n")
    key = cache.key(["cc", "-O1"], source, [])
    assert cache.get(key, tmp_path / "out.o") is None
    (tmp_path / "made.o").write_bytes(b"object")
    cache.put(key, tmp_path / "made.o", "a warning")
    assert cache.get(key, tmp_path / "out.o") == "a warning"
    assert (tmp_path / "out.o").read_bytes() == b"object"
    assert cache.key(["cc", "-O2"], source, []) != key
    header.write_text("long x;\n")
    assert cache.key(["cc", "-O1"], source, []) != key
    header.write_text("int x;\n")
    assert cache.key(["cc", "-O1"], source, []) == key
