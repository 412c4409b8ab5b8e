"""What is installed: headers, library, stub, version; a light import; a C program against it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvpool

ROOT = Path(__file__).resolve().parent.parent


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout


def test_versions_agree_everywhere() -> None:
    assert importlib.metadata.version("kvpool") == kvpool.__version__
    assert kvpool.abi_version == 1
    for path, pattern in (
        ("pyproject.toml", r'^version = "([^"]+)"'),
        ("CMakeLists.txt", r"^project\(kvpool VERSION (\S+)"),
        ("c/CMakeLists.txt", r"^project\(tinyllm VERSION (\S+)"),
    ):
        match = re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)
        assert match is not None
        assert match[1] == kvpool.__version__, path


def test_all_is_what_there_is() -> None:
    assert sorted(kvpool.__all__) == list(kvpool.__all__)
    assert all(hasattr(kvpool, name) for name in kvpool.__all__)


def test_headers_and_library_are_in_the_package() -> None:
    include = Path(kvpool.get_include())
    installed = sorted(p.relative_to(include).as_posix() for p in include.rglob("*.h"))
    source = ROOT / "c" / "include"
    assert installed == sorted(p.relative_to(source).as_posix() for p in source.rglob("*.h"))
    for name in installed:
        assert (include / name).read_bytes() == (source / name).read_bytes()
    assert Path(kvpool.get_library()).is_file()
    package = Path(kvpool.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_core.pyi").is_file()


PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include "tinyllm.h"

int main(void) {
    tl_kv_cfg cfg = {4, 2, 1, 1, 2, TL_F16, TL_KV_FORMAT_V1};
    tl_kv_pool *pool;
    uint32_t ids[2], tokens[2] = {1, 2};
    if (tl_abi_version() != TL_ABI_VERSION || tl_kv_pool_create(&cfg, &pool) != TL_OK ||
        tl_kv_alloc(pool, 2, ids) != TL_OK || tl_kv_check(pool) != TL_OK) {
        return 1;
    }
    printf("%016llx %s\n", (unsigned long long)tl_kv_block_hash(0, tokens, 2),
           tl_status_str(tl_kv_unref(pool, 3)));
    tl_kv_pool_destroy(pool);
    return 0;
}
"""


def test_a_c_program_is_built_against_the_package(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(PROGRAM)
    library = Path(kvpool.get_library())
    subprocess.run(
        [compiler, "-std=c11", "-Wall", "-Werror", f"-I{kvpool.get_include()}", str(source), "-o",
         str(program), f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-ltinyllm"],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout == "a91ab0c1027b9366 TL_EINVAL\n"


def test_only_tl_symbols_are_exported() -> None:
    nm = shutil.which("nm")
    if nm is None or not sys.platform.startswith("linux"):
        pytest.skip("no nm")

    def exported(path: str) -> list[str]:
        out = subprocess.run(
            [nm, "-D", "--defined-only", path], capture_output=True, text=True, check=True
        )
        return [line.split()[-1] for line in out.stdout.splitlines()]

    assert all(name.startswith("tl_") for name in exported(kvpool.get_library()))
    from kvpool import _core

    assert not [name for name in exported(_core.__file__) if name.startswith("tl_")]


def test_import_needs_only_numpy() -> None:
    code = (
        "import sys, json, numpy\n"
        "before = set(sys.modules)\n"
        "import kvpool\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    new = set(json.loads(python(code))) - set(sys.stdlib_module_names)
    # An editable install brings its import hook along.
    assert {m for m in new if not m.startswith("_kvpool_editable")} == {"kvpool"}


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="sanitizers take their time")
def test_import_takes_less_than_100_ms() -> None:
    code = (  # the processor's time, because other programs may be running
        "import time\n"
        "a = time.process_time()\n"
        "import numpy\n"
        "b = time.process_time()\n"
        "import kvpool\n"
        "print(b - a, time.process_time() - b)"
    )
    runs = [tuple(map(float, python(code).split())) for _ in range(7)]
    ours = sorted(own for _, own in runs)
    assert ours[0] < 0.020, f"kvpool itself, without NumPy: {ours}"
    # NumPy alone may take longer than all of it should on a slow machine.
    numpy = min(numpy for numpy, _ in runs)
    assert min(map(sum, runs)) < max(0.100, numpy + 0.020), runs


def test_the_stub_is_up_to_date() -> None:
    pytest.importorskip("nanobind")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "stub.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_are_right_for_users() -> None:
    """tests/typing/users.py says with assert_type what a user's type checker must see."""
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--no-error-summary",
         "--cache-dir", os.devnull, str(ROOT / "tests" / "typing" / "users.py")],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests" / "typing",
        env={**os.environ, "MYPYPATH": str(ROOT / "src"), "LD_PRELOAD": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
