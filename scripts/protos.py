"""Writes the generated protobuf code of kvpool.transfer, or says where it is not up to date.

    python scripts/protos.py [--check]

Needs grpcio-tools of the version in pyproject.toml's ``test`` extra: another writes other bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src"
PROTOS = ("kv_transfer", "handover")
FOLDER = "kvpool/transfer"


def generate(out: Path) -> dict[str, bytes]:
    """The generated files, by their path below src/."""
    from grpc_tools import protoc

    names = [f"{FOLDER}/{name}.proto" for name in PROTOS]
    code = protoc.main(
        ["protoc", f"-I{SOURCES}", f"--python_out={out}", f"--pyi_out={out}", *names]
    )
    if code != 0:
        raise SystemExit(code)
    return {
        str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*_pb2.py*"))
    }


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: protos.py [--check]", file=sys.stderr)
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, data in generate(Path(folder)).items():
            path = SOURCES / name
            if not arguments:
                path.write_bytes(data)
            elif not path.is_file() or path.read_bytes() != data:
                print(f"src/{name} is not what its .proto gives")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
