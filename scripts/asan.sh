#!/bin/sh
# The Python suite on a build with AddressSanitizer and UndefinedBehaviorSanitizer: the module and
# the C library under it. Arguments go to pytest; without any, everything but tests/engine (NumPy
# arithmetic, too slow here) and the suites that build programs of their own.
#
#   sh scripts/asan.sh [tests/test_wire.py ...]          PYTHON=.venv/bin/python
#
# The sanitized package goes to build/asan/site and is put before the installed one. Leaks are not
# counted: CPython keeps much until it ends; tests/test_lifetime.py looks for ours.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=$PWD/build/asan
cc=${CC:-gcc}

isolation=""
if "$python" -c 'import nanobind, scikit_build_core' 2>/dev/null; then
    isolation=--no-build-isolation
fi
rm -rf "$out/site"
# shellcheck disable=SC2086 # no flag is no argument
CC=$cc "$python" -m pip install --quiet --disable-pip-version-check --no-deps $isolation \
    --target "$out/site" . -C build-dir="$out/build" -C cmake.build-type=RelWithDebInfo \
    -C install.strip=false -C cmake.define.TL_SANITIZE=address,undefined

# libstdc++ comes along so that the sanitizer finds __cxa_throw before the module is loaded.
preload="$($cc -print-file-name=libasan.so) $($cc -print-file-name=libstdc++.so)"
run() {
    PYTHONPATH=$out/site PYTHONMALLOC=malloc LD_PRELOAD=$preload \
        ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:strict_string_checks=1:quarantine_size_mb=8:abort_on_error=1 \
        UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 "$python" "$@"
}
# An editable install comes first whatever the path says: this must be the sanitized module.
run -c "import sys, kvpool._core as c; sys.exit(not c.__file__.startswith('$out/site'))" || {
    echo "the sanitized build is not the one that is imported; uninstall kvpool or use another venv"
    exit 1
}
[ $# -gt 0 ] || set -- tests --ignore=tests/engine --ignore=tests/workbench \
    --ignore=tests/integrations --ignore=tests/conformance
run -m pytest -p no:cacheprovider "$@"
