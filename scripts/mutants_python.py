"""Runs the Python suite over planted bugs: what `make mutants` needs beyond C.

The module is built once by CMake, without a sanitizer and with the binding not optimized. For a
mutant only the changed objects are compiled again and the module is linked anew; the package around
it is a folder of links to the checkout. The suite stops at its first failure.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

# What a bug can reach through the module; threads, doctests and packaging are slow and see nothing
# that these do not.
TEST_FILES = (
    "conformance/test_readers.py",
    "test_pool.py",
    "test_wire.py",
    "test_arguments.py",
    "test_hashing.py",
    "test_errors.py",
    "test_views.py",
    "test_lifetime.py",
    "test_pool_model.py",
    "test_attention.py",
    "test_paged_cache.py",
    "test_slab.py",
)
SUITE_LIMIT_S = 120.0
BUILD_LIMIT_S = 600.0

_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+)", re.MULTILINE)


def missing_tools() -> list[str]:
    """The Python packages that the suite needs and this interpreter lacks."""
    wanted = ("numpy", "nanobind", "pytest", "hypothesis")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    return missing + [name for name in ("cmake", "ninja") if _tool(name) is None]


def _tool(name: str) -> str | None:
    beside = Path(sys.executable).parent / name  # in the virtual environment, activated or not
    return str(beside) if beside.is_file() else shutil.which(name)


class PythonSuite:
    """The module, built once, and the suite over variants of it.

    ``workbench`` is the package kvpool.workbench, however the caller has imported it.
    """

    def __init__(self, root: Path, folder: Path, workbench: Any) -> None:
        self.root, self.folder, self.workbench = root, folder, workbench
        self.build, self.prefix = folder / "cmake", folder / "prefix"
        self.chain: Any = None
        self.commands: dict[str, list[str]] = {}

    # ---- building ---------------------------------------------------------------------------

    def prepare(self) -> None:
        """Configures, builds and installs the unchanged module. Raises RuntimeError."""
        cmake, ninja = _tool("cmake"), _tool("ninja")
        nanobind = importlib.import_module("nanobind").cmake_dir()
        self.build.mkdir(parents=True, exist_ok=True)
        self._must(
            [
                cmake, "-S", self.root, "-B", self.build, "-G", "Ninja",
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                "-DSKBUILD=2", f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dnanobind_DIR={nanobind}",
                "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
                "-DCMAKE_BUILD_TYPE=Release",
                "-DCMAKE_C_FLAGS_RELEASE=-O1", "-DCMAKE_CXX_FLAGS_RELEASE=-O0", "-DKVPOOL_IPO=OFF",
                "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF",
            ]
        )  # fmt: skip
        self._must([cmake, "--build", self.build, "-j", str(self.workbench.toolchain.n_jobs())])
        self._must([cmake, "--install", self.build, "--prefix", self.prefix])
        for entry in json.loads((self.build / "compile_commands.json").read_text()):
            self.commands[Path(entry["file"]).name] = shlex.split(entry["command"])
        plain = self.workbench.toolchain.Toolchain(("cc",), sanitize=False, extra=("-fPIC",))
        self.chain = plain

    def _must(self, command: list[Any]) -> None:
        done = self.workbench.process.run(
            [str(word) for word in command], timeout_s=BUILD_LIMIT_S, merge=True, cwd=self.build
        )
        if done.code != 0:
            raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-3000:]}")

    def _link(self, objects: list[Path], out: Path) -> None:
        """The module with some objects in place of the library's or the binding's."""
        replaced = {path.stem.split("-")[0] for path in objects}
        mine = [
            path
            for path in sorted(self.build.glob("CMakeFiles/_core.dir/binding/*.o"))
            if path.name.split(".")[0] not in replaced
        ]
        nanobind = sorted(self.build.glob("libnanobind*.a"))
        library = sorted(self.build.glob("c/libtinyllm*.a"))
        words = ["c++", "-shared", "-fPIC", "-o", out, *mine, *objects, *nanobind, *library]
        self._must([*words, "-lpthread"])

    # ---- one mutant -------------------------------------------------------------------------

    def package(self, name: str, objects: list[Path], files: list[Path] | None = None) -> Path:
        """A folder with an importable kvpool whose module has the given objects.

        ``files`` take the place of the package's modules of the same name.
        """
        folder = self.folder / "packages" / name
        shutil.rmtree(folder, ignore_errors=True)
        package = folder / "kvpool"
        package.mkdir(parents=True)
        for source in (self.root / "src/kvpool", self.prefix / "kvpool"):
            for path in source.iterdir():
                link = package / path.name
                if not path.name.startswith(("_core.", "__pycache__")) and not link.exists():
                    link.symlink_to(path)
        for path in files or []:
            (package / path.name).unlink()
            shutil.copyfile(path, package / path.name)
        self._link(objects, package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}")
        return folder

    def objects(self, mutant: Any, workshop: Any) -> list[Path]:
        """The changed objects of a mutant of the library or of the binding."""
        text = mutant.patch.read_text(encoding="utf-8")
        if "b/binding/" not in text:
            python_shop = self.workbench.mutation.Workshop(
                workshop.assets, self.chain, self.folder / "c", workshop.units
            )
            return list(python_shop.mutate(mutant))
        folder = workshop.overlay(mutant, Path("binding"))
        objects = []
        for source in sorted((folder / "binding").glob("*.cpp")):
            command = list(self.commands[source.name])
            out = folder / f"{source.stem}.o"
            original = self.root / "binding" / source.name
            command[command.index("-o") + 1] = str(out)
            command = [str(source) if word == str(original) else word for word in command]
            self._must([*command, "-O0", f"-I{self.root / 'binding'}"])
            objects.append(out)
        return objects

    def run(self, folder: Path) -> tuple[bool, tuple[str, ...], str]:
        """The suite over a package: whether it passed, what failed, how it ended."""
        packages = [*site.getsitepackages(), site.getusersitepackages()]
        path = os.pathsep.join([str(folder), *[p for p in packages if Path(p).is_dir()]])
        tests = [self.root / "tests" / name for name in TEST_FILES]
        # -S: no .pth file, so no editable install of kvpool comes before the package under test.
        command = [
            sys.executable, "-S", "-m", "pytest", "-x", "-q", "--tb=no", "-rfE",
            "-p", "no:cacheprovider", "--hypothesis-seed=0",
            *[str(test) for test in tests if test.is_file()],
        ]  # fmt: skip
        done = self.workbench.process.run(
            command,
            timeout_s=SUITE_LIMIT_S,
            merge=True,
            cwd=self.root,
            env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        names = [name.split("::")[-1] for name in _FAILED.findall(done.stdout)]
        failed = tuple(dict.fromkeys(names))
        if done.code not in (0, 1) and not failed:
            return False, (), done.ending() + "".join(f"\n{x}" for x in _tail(done.stdout))
        return done.code == 0, failed, "" if failed or done.code == 0 else done.ending()

    def attack(self, mutant: Any, workshop: Any) -> Any:
        """One mutant through the suite, as a Kill."""
        kill, mutation = self.workbench.mutation.Kill, self.workbench.mutation
        try:
            name = hashlib.sha256(mutant.id.encode()).hexdigest()[:12]
            if "b/src/kvpool/" in mutant.patch.read_text(encoding="utf-8"):
                changed = workshop.overlay(mutant, Path("src/kvpool")) / "kvpool"
                folder = self.package(name, [], sorted(changed.glob("*.py")))
            else:
                folder = self.package(name, self.objects(mutant, workshop))
        except (mutation.patches.PatchError, mutation.BuildError, RuntimeError) as error:
            return kill(mutant, "python", "broken", note=str(error))
        passed, failed, ending = self.run(folder)
        shutil.rmtree(folder, ignore_errors=True)
        state = "survived" if passed else "killed"
        return kill(mutant, "python", state, failed, "" if failed else ending)


def _tail(text: str) -> list[str]:
    return text.strip().splitlines()[-3:]
