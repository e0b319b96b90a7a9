# From a clone: `make demo` and `make test` set up what they need. `make help` lists the rest.

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo wheel wheel-cuda bundle release test test-more test-full test-repeat test-native fuzz check bench fmt lock screenshots clean

BIN := .venv/bin
# What Python compiled is kept, whatever the caller's environment says: compiling the tests takes ten seconds.
unexport PYTHONDONTWRITEBYTECODE
# How long `make fuzz` looks for findings.
SECONDS ?= 600
# Test files that run at once; those of one file never do. Most tests wait more than they compute.
WORKERS ?= 4
# In the order of `testpaths`: by itself it would begin with the files that have the most tests, which are the shortest.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# For test-repeat: how often, and how tests are dealt out (load: those of one file may run at once, too).
N ?= 10
DIST ?= loadfile
# Folders of Python code that exist.
CODE := $(wildcard src tests bench tools)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with the locked dependencies and the mesh-llm command
	@sh tools/setup.sh

setup-dev: ## and what tests and tools need; part of the targets that do
	@sh tools/setup.sh dev

demo: setup ## a mesh on this machine and one question to it; ARGS="--once" and others go to mesh-llm demo
	@$(BIN)/mesh-llm demo $(ARGS)

wheel: setup ## a wheel with native libraries for the common processors, and an sdist, to dist/
	@$(BIN)/python -m tools.wheel $(ARGS)

wheel-cuda: setup ## mesh-llm-cuda, a wheel with libggml-cuda; ARGS="--architectures 90-real" compiles for one kind of GPU
	@$(BIN)/python -m tools.wheel_cuda $(ARGS)

bundle: setup ## one file that installs mesh-llm on machines of this kind; ARGS go to mesh-llm bundle
	@$(BIN)/mesh-llm bundle $(ARGS)

release: setup ## wheel, sdist, bundle, SBOM, provenance and sums, to dist/VERSION; KEY=FILE signs with an SSH key
	@$(BIN)/python -m tools.release $(if $(KEY),--key $(KEY)) $(ARGS)

test: check ## check, the native tests, all tests but those marked `full`; ARGS="-k name" and others go to pytest
	sh tools/test_native.sh plain
	sh tools/test_native.sh address
	$(BIN)/pytest -m "not full" $(PARALLEL) $(ARGS)

test-more: setup-dev ## what make test leaves out and CI runs after it: threads, a minute of fuzzing, tests marked `full`
	sh tools/test_native.sh thread
	sh tools/fuzz_native.sh 60
	$(BIN)/pytest -x -m "full and not long" $(PARALLEL) $(ARGS)

test-full: check test-native fuzz ## check, then every test, and fuzzing for SECONDS=600
	$(BIN)/pytest $(PARALLEL) $(ARGS)

test-repeat: setup-dev ## the tests that ARGS name, N=10 times, until a run fails
	@for run in $$(seq $(N)); do \
		$(BIN)/pytest -q -n $(WORKERS) --dist $(DIST) $(ARGS) || exit 1; echo "run $$run of $(N) passed"; \
	done

test-native: setup-dev ## the native tests: plain, then under the address and thread sanitizers
	sh tools/test_native.sh plain
	sh tools/test_native.sh address
	sh tools/test_native.sh thread

fuzz: setup-dev ## look for findings in workers for SECONDS=600
	sh tools/fuzz_native.sh $(SECONDS)

check: setup-dev ## lint, format, types, import direction, native code
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/pytest -q tests/unit/test_architecture.py
	sh tools/check_native.sh

bench: setup-dev ## the quick benchmarks, tables to bench/results; ARGS go to bench.run
	@$(BIN)/python -m bench.run --quick $(ARGS)

fmt: setup-dev ## format the code, mend what the linter can mend
	$(BIN)/ruff check --fix-only --exit-zero $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/python -c 'from mesh_llm.cli import entry, main; entry.HELP.write_text(main.help_text(entry.HELP_COLUMNS))'
	$(BIN)/python tools/error_messages.py
	$(BIN)/python -m bench.summary

lock: ## write the lock files anew from pyproject.toml; ARGS="--upgrade" takes newer versions
	@sh tools/lock.sh $(ARGS)

screenshots: setup-dev ## the pictures of the console in docs/, from a mesh on this machine
	$(BIN)/python -m tests.browser.screenshots

clean: ## remove .venv, build output and caches of this clone
	rm -rf .venv .setup.lock build dist native/build .mypy_cache .pytest_cache .ruff_cache
	find src tests $(wildcard bench tools) -name __pycache__ -type d -prune -exec rm -rf {} +
