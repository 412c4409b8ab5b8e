#!/bin/sh
# make check: formatters, linters, types, the architecture, the generated stub. Runs all of them and
# fails if one did.
bin=.venv/bin
failed=""
step() {
    name=$1
    shift
    echo "== $name"
    "$@" || failed="$failed $name"
}
c_files=$(git ls-files 'c/*.c' 'c/*.h' 'conformance/*.c')
cxx_files=$(git ls-files 'binding/*.cpp' 'binding/*.hpp')

step ruff $bin/ruff check .
step ruff-format $bin/ruff format --check .
step mypy $bin/mypy
# shellcheck disable=SC2086 # the lists are meant to be split
step clang-format $bin/clang-format --dry-run -Werror $c_files $cxx_files
step clang-tidy sh scripts/clang-tidy.sh
step stub $bin/python scripts/stub.py --check
step protos $bin/python scripts/protos.py --check
step architecture $bin/python -m pytest -q tests/test_architecture.py

[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
echo "all clean"
