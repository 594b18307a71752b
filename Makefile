# The only place where commands live: people, hooks (`make hooks`) and CI call these.
# Needs cargo, Python 3.11 or newer with venv, gcc and make; everything else is installed into .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# The tests load the extension that the builds replace.
.NOTPARALLEL:
# What Python has compiled is kept, whatever the environment says: without, importing torch takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

# Where rustup cannot fetch the toolchain of rust-toolchain.toml, the one that it has must do.
ifneq ($(shell command -v rustup),)
ifeq ($(shell cargo --version),)
export RUSTUP_TOOLCHAIN := stable
endif
endif

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYO3_PYTHON := $(abspath $(BIN)/python)
# maturin looks for zig through the first Python on the path.
export PATH := $(abspath $(BIN)):$(PATH)
# Wheels for this many-Linux level install wherever torch's own do.
COMPATIBILITY := manylinux_2_28

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml 2>/dev/null)

.PHONY: help
help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# --- set-up -------------------------------------------------------------------

.PHONY: setup
setup: $(VENV)/installed ## Environment, torch, Rust build, install (the others do it by themselves)

$(BIN)/uv: requirements/dev.lock
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv --clear $(VENV) \
		|| { echo "python's venv module is missing: apt-get install python3-venv"; exit 1; }
	awk '/^[a-z]/{p=0} /^uv==/{p=1} p' requirements/dev.lock > $(VENV)/uv.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(VENV)/uv.lock
	@touch $@

# Another Python was asked for than the environment has: make it anew.
ifeq ($(origin PYTHON),command line)
VERSION := import sys; print(sys.version_info[:2])
ifneq ($(shell $(PYTHON) -c '$(VERSION)'),$(shell $(BIN)/python -c '$(VERSION)' 2>/dev/null))
.PHONY: $(BIN)/uv
endif
endif

# The extension was removed by hand.
ifeq ($(wildcard python/memascend/_core.abi3.so),)
.PHONY: $(VENV)/installed
endif

$(VENV)/synced: $(BIN)/uv
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements/dev.lock
	@touch $@

$(VENV)/installed: $(VENV)/synced $(RUST_SOURCES) pyproject.toml
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --uv --quiet --release --locked
	@touch $@

# --- use ----------------------------------------------------------------------

.PHONY: demo
demo: setup ## Train in memory and offloaded, side by side, and compare every bit
	$(BIN)/memascend demo

# Two tools of the development environment, in the versions and with the hashes of its lock, and nothing else of it.
.venv-wheel/synced: requirements/dev.lock
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs"; exit 1; }
	$(PYTHON) -m venv --clear .venv-wheel \
		|| { echo "python's venv module is missing: apt-get install python3-venv"; exit 1; }
	awk '/^[a-z]/{p=/^(maturin|ziglang)==/} p' requirements/dev.lock > .venv-wheel/tools.lock
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv-wheel/tools.lock
	@touch $@

.PHONY: wheel
wheel: export PATH := $(abspath .venv-wheel/bin):$(PATH)
wheel: export PYO3_PYTHON := $(abspath .venv-wheel/bin/python)
wheel: .venv-wheel/synced ## Build dist/*.whl for any Linux of this processor, and the sdist
	rm -rf dist
	.venv-wheel/bin/maturin build --zig --compatibility $(COMPATIBILITY) --out dist
	.venv-wheel/bin/maturin sdist --out dist
	@echo "pip install $$(ls dist/*.whl)"

# Whichever of its Pythons a bare container has, or a package of it.
IMAGE ?= python:3.11-slim
.PHONY: test-wheel
test-wheel: ## Install the wheel of dist/ in a bare container, IMAGE=almalinux:8, and run the demo there (needs docker)
	docker run --rm --volume "$(CURDIR)/dist:/dist:ro" --volume "$(CURDIR)/.ci:/ci:ro" $(IMAGE) sh /ci/wheel

# --- check --------------------------------------------------------------------

.PHONY: lint
lint: lint-quick ## Formatting, lints and types, of Rust and Python, spelling, and the workflows; builds nothing
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet --strict-collection --persona pedantic .github

.PHONY: lint-quick
lint-quick: $(VENV)/synced ## What of the lints takes seconds
	cargo fmt --check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

.PHONY: hooks
hooks: $(VENV)/synced ## Have git run the quick lints before each commit of this clone
	hook=$$(git rev-parse --git-path hooks)/pre-commit; mkdir -p $$(dirname $$hook); \
	printf '#!/bin/sh\nexec make --no-print-directory lint-quick\n' > $$hook; chmod +x $$hook

.PHONY: fmt
fmt: $(VENV)/synced ## Format everything
	cargo fmt
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet .

# Four processes keep two cores busy, as some wait for processes of their own or for the disk; tests of one file go to one
# process as long as all have work.
PYTEST_OPTIONS := -n 4 --dist worksteal

# In the order of how often they fail; a name that no test has is an error.
.PHONY: quick
quick: lint setup ## Lint, and the tests that fail most often first: two minutes
	$(BIN)/pytest $(PYTEST_OPTIONS) -m "not slow and not soak" @tests/quick.txt

.PHONY: test
test: setup test-rust ## The tests of every push
	$(BIN)/python -m mypy.stubtest memascend._core
	$(BIN)/pytest $(PYTEST_OPTIONS) -m "not slow and not soak"

.PHONY: test-rust
test-rust: $(VENV)/synced ## The Rust tests alone
	timeout 900 cargo test --quiet --locked --workspace

.PHONY: test-all
test-all: test test-slow test-simulated test-valgrind test-oldest test-clients test-clients-slow test-trainers-oldest test-axolotl test-swift test-llamafactory docs ## Everything: slow tests, Valgrind, oldest torch, clients, plugins, the site

.PHONY: test-slow
test-slow: setup ## The tests that take longer than a push can wait
	MEMASCEND_TEST_LONG=1 cargo test --quiet --locked -p memascend-math -p memascend-store -p memascend-engine
	$(BIN)/pytest $(PYTEST_OPTIONS) -m "slow and not soak and not simulated"
	cargo test --quiet --locked --release -p memascend-math --lib -- --ignored

# Leaks are looked for where nothing forks: a forked child ends with its parent's threads gone and their memory left.
VALGRIND := valgrind --quiet --error-exitcode=99 --show-leak-kinds=definite
.PHONY: test-valgrind
test-valgrind: export PROPTEST_CASES := 20
test-valgrind: ## The Rust tests of host memory under Valgrind
	@command -v valgrind >/dev/null || { echo "valgrind is missing: apt-get install valgrind"; exit 1; }
	runner=CARGO_TARGET_$$(rustc --print host-tuple | tr a-z- A-Z_)_RUNNER; \
	env "$$runner=$(VALGRIND) --leak-check=full --errors-for-leak-kinds=definite" \
		cargo test --quiet --locked -p memascend-mem --lib --test model --target-dir target/valgrind; \
	env "$$runner=$(VALGRIND) --child-silent-after-fork=yes" \
		cargo test --quiet --locked -p memascend-mem --test region --target-dir target/valgrind; \
	env "$$runner=$(VALGRIND) --leak-check=full --errors-for-leak-kinds=definite" MEMASCEND_TEST_SHORT=1 \
		cargo test --quiet --locked -p memascend-math --target-dir target/valgrind

.PHONY: test-oldest
test-oldest: setup ## The Python tests on the oldest supported torch
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-oldest
	$(BIN)/uv pip install --quiet --python .venv-oldest/bin/python -r requirements/oldest.lock
	VIRTUAL_ENV=$(abspath .venv-oldest) $(BIN)/maturin develop --uv --quiet --release --locked
	.venv-oldest/bin/pytest $(PYTEST_OPTIONS) -m "not slow and not soak"

# What is there already stays; the lock says what has to be.
CLIENTS := clients trainers-oldest axolotl swift llamafactory
$(CLIENTS:%=.venv-%/synced): .venv-%/synced: $(VENV)/synced requirements/%.lock
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-$*
	$(BIN)/uv pip sync --quiet --python .venv-$*/bin/python --require-hashes requirements/$*.lock
	@touch $@

$(CLIENTS:%=.venv-%/installed): .venv-%/installed: .venv-%/synced $(VENV)/installed
	VIRTUAL_ENV=$(abspath .venv-$*) $(BIN)/maturin develop --uv --quiet --release --locked
	@touch $@

.PHONY: test-clients
test-clients: .venv-clients/installed ## Optimizers, averages and loops of other libraries, in an environment of their own
	.venv-clients/bin/pytest $(PYTEST_OPTIONS) -W default -m "not slow" tests/clients

.PHONY: test-clients-slow
test-clients-slow: .venv-clients/installed ## Kills of each kind of Trainer at each moment, and of ranks
	.venv-clients/bin/pytest $(PYTEST_OPTIONS) -W default -m slow tests/clients

.PHONY: test-trainers-oldest
test-trainers-oldest: .venv-trainers-oldest/installed ## Trainers of the oldest transformers, TRL and accelerate
	.venv-trainers-oldest/bin/pytest $(PYTEST_OPTIONS) -W default -m "not slow" \
		tests/checkpoint/test_trainer*.py tests/clients/test_train*.py

.PHONY: test-newest
test-newest: setup ## Trainers of the newest torch, transformers and TRL, whatever the locks say
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-newest
	$(BIN)/uv pip install --quiet --python .venv-newest/bin/python --upgrade -r requirements/clients.in
	VIRTUAL_ENV=$(abspath .venv-newest) $(BIN)/maturin develop --uv --quiet --release --locked
	.venv-newest/bin/pytest $(PYTEST_OPTIONS) -W default -m "not slow" \
		tests/checkpoint/test_trainer*.py tests/clients/test_train*.py

.PHONY: test-axolotl
test-axolotl: .venv-axolotl/installed ## The plugin in Axolotl, in an environment of its own
	.venv-axolotl/bin/pytest -W default tests/clients/test_integrations.py

.PHONY: test-swift
test-swift: .venv-swift/installed ## The plugin in ms-swift, in an environment of its own
	.venv-swift/bin/pytest -W default tests/clients/test_integrations.py

.PHONY: test-llamafactory
test-llamafactory: .venv-llamafactory/installed ## The patch in LLaMA-Factory, in an environment of its own
	.venv-llamafactory/bin/pytest -W default tests/clients/test_integrations.py

.PHONY: clients-table
clients-table: .venv-clients/installed ## Renew docs/optimizers.md: what of these libraries streams
	PYTHONPATH=tests .venv-clients/bin/python -m clients.optimizers

# An environment of its own: nothing of the site is needed to train.
.venv-docs/synced: $(BIN)/uv requirements/docs.lock
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-docs
	$(BIN)/uv pip sync --quiet --python .venv-docs/bin/python --require-hashes requirements/docs.lock
	@touch $@

.PHONY: docs
docs: .venv-docs/synced ## The site of the documents, in target/site, checked as a reader would see it
	.venv-docs/bin/python docs/make_site.py
	.venv-docs/bin/python docs/check_site.py

.PHONY: drawings
drawings: .venv-clients/installed ## Draw the pictures of docs/drawings anew; the terminal is recorded, a minute
	$(BIN)/python docs/drawings/draw.py
	.venv-clients/bin/python docs/drawings/terminal.py

.PHONY: test-simulated
test-simulated: setup ## The order of all that a GPU does, on a simulated CUDA, which is compiled first
	$(BIN)/pytest $(PYTEST_OPTIONS) -m simulated tests/device

.PHONY: test-gpu
test-gpu: setup ## The tests that need a CUDA device, where there is one; all others compute on the CPU there, too
	MEMASCEND_GPU=1 $(BIN)/pytest -m gpu --timeout 600

# From a wheel, without cargo, network or set-up: SLICE="--wheel W.whl --packages wheels". Again until all is done.
SLICE ?=
.PHONY: gpu
gpu: ## One slice of the tests of a GPU, from the wheel in dist/; goes on where the last one stopped
	$(PYTHON) tests/device/slices.py $(SLICE)

.PHONY: soak
soak: setup ## Tests that run for minutes
	$(BIN)/pytest -m soak --timeout 1800
	MEMASCEND_SEEDS=20000 cargo test --release --locked -p memascend-store --test stores crash::random_lives_open_at_a_committed_step

.PHONY: mutants
mutants: setup ## Whether the tests notice each known fault; MUTANTS="store grads" for some (all: half an hour)
	$(BIN)/python tests/mutants/gate.py $(MUTANTS)

.PHONY: fuzz
fuzz: ## The catalog's parsers on bytes that nobody wrote, for a minute
	mkdir -p rust/store/fuzz/corpus
	cd rust/store/fuzz && RUSTFLAGS="$(COVERED)" cargo build --quiet --release --locked --target $$(rustc --print host-tuple)
	rust/store/fuzz/target/$$(rustc --print host-tuple)/release/catalog -max_total_time=60 -max_len=9000 \
		-rss_limit_mb=1024 -artifact_prefix=rust/store/fuzz/ rust/store/fuzz/corpus
# What cargo-fuzz passes, but for what only a nightly toolchain knows.
COVERED := -Cpasses=sancov-module -Ccodegen-units=1 -Cdebug-assertions -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares

# The peers' environments are none of our dependencies.
PEERS := .venv-deepspeed
.PHONY: peers
peers: $(PEERS)/built ## DeepSpeed in an environment of its own, which the benchmarks then find

# DeepSpeed's set-up wants torch; its extensions are built when first used, so they are used here.
$(PEERS)/built: requirements/deepspeed.lock | $(VENV)/synced
	@command -v c++ >/dev/null || { echo "a C++ compiler is missing: apt-get install g++"; exit 1; }
	@echo '#include <libaio.h>' | c++ -E -x c++ - >/dev/null 2>&1 || { echo "libaio is missing: apt-get install libaio-dev"; exit 1; }
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(PEERS)
	awk '/^[a-z]/{p=!/^deepspeed==/} p' requirements/deepspeed.lock > $(PEERS)/others.lock
	$(BIN)/uv pip sync --quiet --python $(PEERS)/bin/python --require-hashes $(PEERS)/others.lock
	export PATH="$(abspath $(PEERS)/bin):$$PATH" DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
		TORCH_EXTENSIONS_DIR=$(abspath $(PEERS))/torch_extensions; \
	$(BIN)/uv pip install --quiet --python $(PEERS)/bin/python --no-build-isolation --require-hashes \
		-r requirements/deepspeed.lock; \
	$(PEERS)/bin/python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(); \
		from deepspeed.ops.op_builder.cpu import CPUAdamBuilder; CPUAdamBuilder().load()'
	@touch $@

.PHONY: bench
bench: setup ## Benchmarks: tables with ratios, and pictures in benchmarks/results; beside DeepSpeed after `make peers`
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.memory --picture benchmarks/results/host_memory.png
	$(BIN)/python -m benchmarks.peers.bench_io --picture benchmarks/results/io.png
	$(BIN)/python -m benchmarks.peers.bench_update
	$(BIN)/python -m benchmarks.import_cost
	$(BIN)/python -m benchmarks.depth --write benchmarks/results
	$(MAKE) --no-print-directory bench-train

.PHONY: bench-rust
bench-rust: $(VENV)/synced ## Microbenchmarks of the Rust crates
	cargo bench --locked --workspace

# What is in benchmarks/results/train already is not measured again: remove it to begin anew.
TRAIN := $(BIN)/python -m benchmarks.train --results benchmarks/results/train
.PHONY: bench-train
bench-train: setup ## The headline cells of training beside its peers: 20 minutes
	$(TRAIN) --parts cells kept-curves --picture benchmarks/results/train.png | tee benchmarks/results/train.txt

# The cells that README's table shows. A processor without units for bfloat16 needs DTYPE=float32.
DTYPE ?= bfloat16
.PHONY: bench-readme
bench-readme: setup ## README's table of what was measured: 20 minutes after `make peers`
	$(TRAIN) --parts cells --dtype $(DTYPE) --workloads 125M-1x128 125M-8x1x128 125M-1x128-clip --systems torch memascend \
		memascend-held zero-infinity zero-infinity-pipelined zero-offload fsdp2-offload \
		| tee benchmarks/results/readme$(if $(filter float32,$(DTYPE)),_float32).txt

.PHONY: bench-full
bench-full: setup ## All cells of training, ablation, curves, limits, reach: two hours; goes on where it was interrupted
	$(TRAIN) --full --picture benchmarks/results/train_full.png | tee benchmarks/results/train_full.txt
	$(BIN)/python -m benchmarks.larger_than_memory | tee benchmarks/results/larger_than_memory.txt

# Each layout by itself, since both would take 45 GB of storage at once. MEMASCEND_BENCH_DIR says where.
.PHONY: bench-update
bench-update: $(VENV)/synced ## The update of 400 M parameters alone, into benchmarks/results (10 minutes, 25 GB)
	for layout in compact whole; do \
		MEMASCEND_BENCH_MPARAMS=400 MEMASCEND_BENCH_ROUNDS=5 MEMASCEND_BENCH_LAYOUT=$$layout \
			cargo bench --quiet --locked -p memascend-engine --bench update; \
	done | tee benchmarks/results/update_cargo.txt

.PHONY: bench-step
bench-step: setup ## The training step beside RAM and its bound, and what the module hooks cost (a quiet machine, half an hour)
	$(BIN)/python -m benchmarks.hooks --write benchmarks/results
	$(BIN)/python -m benchmarks.step --write benchmarks/results

# On which disk, of which size, as how small a card: GPU="--storage /mnt/nvme --store 48GiB --card 24GiB --longest 131072".
GPU ?=
.PHONY: bench-gpu
bench-gpu: setup ## On a CUDA device: the kernels, and the largest model that the disk holds within a tenth of its state
	$(BIN)/python -m benchmarks.kernels_gpu | tee benchmarks/results/kernels_gpu.txt
	$(BIN)/python -m benchmarks.cuda --write benchmarks/results $(GPU)

.PHONY: bench-headline
bench-headline: setup ## On a CUDA device with 60 GB of disk: README's regime, in eight minutes
	$(BIN)/python -m benchmarks.cuda --headline --write benchmarks/results $(GPU)

# --- keep ---------------------------------------------------------------------

.PHONY: lock
lock: $(VENV)/synced ## Renew the locks of the development environment
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --upgrade \
		requirements/dev.in -o requirements/dev.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --upgrade \
		requirements/oldest.in -o requirements/oldest.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --upgrade \
		requirements/clients.in -o requirements/clients.lock
	for name in trainers-oldest axolotl swift llamafactory; do $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
		--generate-hashes --no-header --upgrade requirements/$$name.in -o requirements/$$name.lock; done
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --upgrade \
		requirements/docs.in -o requirements/docs.lock
	cargo update

# What a release is called, and what its page says; the workflow that publishes asks for both.
.PHONY: version
version: ## Print the version, which Cargo.toml has
	@awk -F '"' '/^version = /{print $$2; exit}' Cargo.toml

.PHONY: notes
# GitHub shows each end of a line as one, so lines that go on are joined.
notes: ## Print CHANGELOG's section of this version
	@awk -v version="$$($(MAKE) --silent version)" '/^## /{sub(",", "", $$2); own = $$2 == version; next} \
		own{printf "%s%s", /^  / ? "" : "\n", $$0; found = 1} END{print ""; exit !found}' CHANGELOG.md

.PHONY: clean
clean: ## Remove everything that the commands made
	rm -rf $(VENV) .venv-* .cache target dist .pytest_cache .mypy_cache .ruff_cache .hypothesis python/memascend/*.so
	find . -name __pycache__ -prune -exec rm -rf {} +
