"""Dependencies point one way (ARCHITECTURE.md): a layer may use what stands before it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# C: which directories' headers the files of a directory may include. Every file may use the ground
# that all stand on: tinyllm/abi.h and runtime/internal.h.
GROUND = {"tinyllm/abi.h", "runtime/internal.h"}
C_MAY_USE = {
    "numerics": ["numerics/", "tinyllm/numerics.h", "tinyllm/kv_pool.h"],  # declares tl_crc32c
    "ds": ["ds/", "tinyllm/ds.h"],
    "runtime": ["runtime/", "ds/", "numerics/", "tinyllm/"],
    "kernels": ["kernels/", "numerics/", "tinyllm/"],  # the pool through its public functions
    "replay": ["tinyllm/replay.h", "tinyllm/ds.h"],
}
# The manager works on any pool: nothing of ours but what kv_pool.h declares.
MANAGER = {"kv_mgr.c", "kv_mgr.h", "kv_seq.c", "kv_seq_view.c", "proof.c", "proof.h"}
NOT_FOR_THE_MANAGER = ("kv_pool_impl.h", "kv_pool_ext.h", "ds/swiss.h")

# Python: what each part of the package may import from the package. "" is the top level's modules.
PY_MAY_USE = {
    "": {""},
    "engine": {"", "engine"},
    "events": {"", "events"},
    "tiers": {"", "wire", "tiers"},
    "transfer": {"", "transfer"},
    "integrations": {"", "integrations"},
    "wire": {"", "wire"},
    "replay": {"", "replay"},
    "workbench": {"", "workbench"},
    "cli": {"", "engine", "transfer", "replay", "tiers", "wire", "workbench", "cli"},
}
# Heavy or optional packages are imported only inside the part that needs them.
HEAVY = {
    "torch", "transformers", "grpc", "grpc_health", "google", "redis", "gguf", "tokenizers",
    "jinja2", "rich", "zmq",
    "msgspec", "prometheus_client", "matplotlib",
}  # fmt: skip
LIGHT = {"", "workbench", "cli"}


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "c/src").rglob("*.[ch]")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_c_layers(path: Path) -> None:
    layer = path.relative_to(ROOT / "c/src").parts[0]
    for header in includes(path):
        allowed = header in GROUND or header.startswith(tuple(C_MAY_USE[layer]))
        assert allowed, f"{layer} may not use {header}"
        if path.name in MANAGER:
            assert not header.endswith(NOT_FOR_THE_MANAGER), f"the manager may not use {header}"


def test_the_manager_calls_only_the_interface_of_kv_pool_h() -> None:
    interface = set(
        re.findall(r"\b(tl_kv_\w+)\(", (ROOT / "c/include/tinyllm/kv_pool.h").read_text())
    )
    own = set(re.findall(r"\b(tl_kv_\w+)\(", (ROOT / "c/include/tinyllm/kv_seq.h").read_text()))
    for name in sorted(MANAGER):
        code = re.sub(
            r"/\*.*?\*/|\"[^\"\n]*\"", "", (ROOT / "c/src/runtime" / name).read_text(), flags=re.S
        )
        used = set(re.findall(r"\b(tl_kv_\w+)\(", code))
        assert used <= interface | own, f"{name} uses {used - interface - own}"


@pytest.mark.parametrize("path", sorted((ROOT / "binding").rglob("*.[ch]pp")), ids=lambda p: p.name)
def test_the_binding_sees_only_public_headers(path: Path) -> None:
    for header in re.findall(r'^\s*#\s*include\s+[<"]([^">]+)', path.read_text(), re.MULTILINE):
        assert not re.match(r"(runtime|ds|numerics)/", header), f"{path.name} includes {header}"


def package_imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top level of the file) for every import, absolute names."""
    package = ["kvpool", *path.relative_to(ROOT / "src/kvpool").parts[:-1]]
    found: list[tuple[str, bool]] = []
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.name, id(node) in top) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{a.name}" for a in node.names] if module == "kvpool" else [module]
            found += [(name, id(node) in top) for name in names]
    return found


def part_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / "src/kvpool" / parts[1]).is_dir() else ""


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "src/kvpool").rglob("*.py")),
    ids=lambda p: str(p.relative_to(ROOT / "src/kvpool")),
)
def test_python_layers(path: Path) -> None:
    relative = path.relative_to(ROOT / "src/kvpool").parts
    part = relative[0] if len(relative) > 1 else ""
    if relative == ("__main__.py",):
        part = "cli"
    for module, at_top in package_imports(path):
        head = module.split(".")[0]
        if head == "kvpool":
            assert part_of(module) in PY_MAY_USE[part], f"{part or 'the package'} imports {module}"
        if head in HEAVY and part in LIGHT and path.stem != "metrics":
            assert not at_top, f"{path.name} imports {module} when it is imported"


def test_the_independent_reader_shares_no_code_with_the_package() -> None:
    path = ROOT / "conformance/drivers/kvwire.py"
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name.split(".")[0] for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        else:
            continue
        assert all(name in sys.stdlib_module_names for name in names), names


def test_no_file_names_the_machine_it_was_written_on() -> None:
    """Neither the folder of this checkout nor the home directory stands in what is committed."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False
    ).stdout.split(b"\0")
    if files == [b""]:
        pytest.skip("not a git checkout")
    words = [f"{folder}/".encode() for folder in (ROOT, Path.home()) if len(folder.parts) > 1]
    for name in filter(None, files):
        path = ROOT / name.decode()
        if path.is_file():
            found = [word.decode() for word in words if word in path.read_bytes()]
            assert not found, f"{name.decode()} names {found}"
