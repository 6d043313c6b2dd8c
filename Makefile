# Every target sets up what it needs; `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.dev-ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: help demo setup native check test test-fast test-compiled bench bench-pipeline bench-streaming bench-broker bench-disk bench-engines bench-shares bench-controllers bench-page bench-demo lab docs constraints clean
help:
	@echo "make demo             show the DRL penalty in a city of sensors, and how SRTM avoids it (about 90 seconds)"
	@echo "make setup            create .venv with pinned versions (the other targets do it as needed)"
	@echo "make native           compile the broker's hot modules, as make setup does if there is a C compiler"
	@echo "make check            run ruff and mypy"
	@echo "make test             run check, all tests on the interpreted build, then test-compiled (PYTEST='-k bucket' selects some)"
	@echo "make test-fast        run the tests that need no Spark, no browser and no other programs"
	@echo "make test-compiled    run the tests of the compiled modules on the compiled build"
	@echo "make bench            run the benchmarks and print tables"
	@echo "make bench-pipeline   compare the Spark jobs with polars, duckdb, numpy and numba"
	@echo "make bench-streaming  measure the Spark source and sink"
	@echo "make bench-broker     compare the broker with nsqd, NATS and a bare forwarder (PART=loads selects a part)"
	@echo "make bench-disk       compare disk topics with nsqd and JetStream that sync"
	@echo "make bench-engines    measure the cost and the benefit of SRTM in front of nsqd and JetStream"
	@echo "make bench-shares     measure how soon a replaced contract is in force, also under kill -9 (PART=cycles selects a part)"
	@echo "make bench-controllers  kill and pause the controller that leads, of three on three NATS servers, ten times"
	@echo "make bench-page       measure the page with 100 topics on 20 brokers (needs Chromium)"
	@echo "make bench-demo       run the demo ten times (RUNS=5 BUSY=1: five times, beside a program that keeps a core busy)"
	@echo "make lab              simulate the paper's evaluation, judge every claim, and write a page to lab-results/"
	@echo "make docs             build the documentation site in site/"
	@echo "make constraints      write constraints.txt from pyproject.toml (UPGRADE=1 takes the newest versions)"
	@echo "make clean            remove .venv and caches"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "SRTM needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing SRTM and its dependencies into $(VENV), once; Spark and Java take a few minutes"
	@$(INSTALL) '.[spark,broker,control,lab,compile]'
	@$(BIN)/python -m tools.native
	@touch $@

$(DEV_READY): $(READY)
	@echo "installing the dependencies of the tests and the documentation"
	@$(INSTALL) '.[dev,spark,broker,control,lab,docs,compile]'
	@touch $@

# Edited sources run interpreted until this is run again. SRTM_INTERPRETED=1 runs everything interpreted.
native: $(READY)
	@$(BIN)/python -m tools.native --required

demo: $(READY)
	@$(BIN)/python examples/transport/demo.py

check: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# How many workers "auto" is, and which tests run in which, says tests/conftest.py.
PARALLEL := --numprocesses auto --no-loadscope-reorder
# Test modules are compiled with their assertions rewritten; a second run need not do it again.
unexport PYTHONDONTWRITEBYTECODE
# Apart, so that --last-failed is of one build.
COMPILED_CACHE := .pytest_cache/compiled
COMPILED_TESTS := tests/protocol tests/broker tests/testing tests/model/test_bucket.py tests/test_native.py

# tests/conftest.py runs them interpreted unless SRTM_COMPILED is set.
test: check
	@$(BIN)/python -m tools.native $(if $(SRTM_REQUIRE_PARTS),--required)
	$(BIN)/pytest $(PARALLEL) $(PYTEST)
	$(if $(PYTEST),,@[ ! -e src/srtm/_native/manifest ] || $(MAKE) --no-print-directory test-compiled)

test-fast: $(DEV_READY)
	HYPOTHESIS_PROFILE=fast SRTM_SEEDS=5 $(BIN)/pytest $(PARALLEL) -m 'not spark and not browser and not processes' $(PYTEST)

test-compiled: $(DEV_READY)
	@$(BIN)/python -m tools.native --required
	SRTM_COMPILED=1 HYPOTHESIS_PROFILE=fast $(BIN)/pytest $(PARALLEL) -o cache_dir=$(COMPILED_CACHE) -m 'not interpreted and not spark and not processes' $(or $(PYTEST),$(COMPILED_TESTS))

bench: $(DEV_READY)
	$(BIN)/python -m bench

bench-pipeline: $(DEV_READY)
	$(INSTALL) '.[bench]'
	$(BIN)/python -m bench.pipeline

bench-streaming: $(DEV_READY)
	$(BIN)/python -m bench.streaming

bench-broker: $(DEV_READY)
	$(BIN)/python -m bench.broker $(PART)

bench-disk: $(DEV_READY)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m bench.disk

bench-engines: $(DEV_READY)
	PATH=.parts/bin:$$PATH $(BIN)/python -m bench.engines

bench-shares: $(DEV_READY)
	$(BIN)/python -m bench.shares $(PART)

bench-controllers: $(DEV_READY)
	$(BIN)/python -m bench.controllers

bench-page: $(DEV_READY)
	$(BIN)/python -m bench.page

bench-demo: $(DEV_READY)
	$(BIN)/python -m bench.demo --runs $(or $(RUNS),10) --busy $(or $(BUSY),0)

lab: $(READY)
	$(BIN)/srtm lab run all
	$(BIN)/srtm lab report

docs: $(DEV_READY)
	$(BIN)/python -m tools.http_api
	$(BIN)/python -m tools.access
	$(BIN)/python -m tools.modules
	$(BIN)/python -m tools.penalty_figure
	$(BIN)/zensical build --strict --clean
	@echo "read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000, then http://127.0.0.1:8000"

constraints:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m tools.constraints $(if $(UPGRADE),--upgrade)

clean:
	rm -rf $(VENV) site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .parts
	rm -rf src/srtm/_native
	find src tests bench -name __pycache__ -type d -exec rm -rf {} +
