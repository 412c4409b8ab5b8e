#!/bin/sh
# clang-tidy over the C library. The tool comes from PyPI without a compiler's own headers; the
# package ziglang carries those of the same clang version.
headers=$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("ziglang").submodule_search_locations[0])')/lib
out=$(.venv/bin/clang-tidy --quiet $(git ls-files 'c/src/*.c') -- \
    -std=c11 -D_GNU_SOURCE -Ic/include -Ic/src -resource-dir "$headers" 2>&1)
status=$?
echo "$out" | grep -v -e 'warnings* generated' -e '^Suppressed' -e '^Use -header-filter' -e '^\[[0-9]*/[0-9]*] Processing'
exit $status
