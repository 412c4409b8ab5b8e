#!/bin/sh
# The C tests on other processors, emulated: arm64, and s390x, whose byte order is the other one: it
# must write the same bytes.
bin=$(pwd)/.venv/bin
failed=""
for arch in aarch64 s390x; do
    cc=$arch-linux-gnu-gcc
    qemu=qemu-$arch
    if ! command -v $cc >/dev/null || ! command -v $qemu >/dev/null; then
        echo "$arch: no cross compiler or no qemu: skipped"
        continue
    fi
    dir=build/c-$arch
    $bin/cmake -S c -B $dir -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DTL_WERROR=ON \
        -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$arch -DCMAKE_C_COMPILER=$cc \
        -DCMAKE_CROSSCOMPILING_EMULATOR="$qemu;-L;/usr/$arch-linux-gnu" &&
        $bin/cmake --build $dir &&
        $bin/ctest --test-dir $dir --output-on-failure -LE 'package|soak' || failed="$failed $arch"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
