# Every target makes .venv once; a second run takes no time. `make PYTHON=python3.13 ...` chooses the interpreter.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# 3.12 and 3.11 come first: for them a wheel carries a redis-server, so that nothing needs to be installed.
PYTHON ?= $(shell for python in python3.12 python3.11 python3.13 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& { echo $$python; break; }; done)

.PHONY: demo up test parity lint bench bench-engine bench-gpu bench-http clean

demo: $(READY)
	$(BIN)/python -m demo.run

up: $(READY)
	$(BIN)/fusequeue up

test: $(READY)
	$(BIN)/pytest -q

# The grid of all architectures (docs/compatibility.md). The processors of five of them import torchvision, which has no
# CPU build: its Python side alone, where nothing else finds it, is enough for them (tests/tiny/torchvision_shim.py).
TORCHVISION := $(VENV)/torchvision

parity: $(READY) $(TORCHVISION)
	FUSEQUEUE_TORCHVISION=$(TORCHVISION) $(BIN)/pytest -q -m "not gpu" tests/parity \
		--compatibility-page docs/compatibility.md

$(TORCHVISION): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ 'torchvision==0.28.*'
	@touch $@

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m bench

bench-engine: $(READY)
	$(BIN)/python -m bench.engine

bench-http: $(READY)
	$(BIN)/python -m bench.over_http

# Where a GPU is at hand: models of real size; keeps bench/results/engine-gpu.json.
bench-gpu: $(READY)
	$(BIN)/python -m bench.engine --gpu

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.13 with its venv module is needed, \
	e.g. apt-get install python3 python3-venv; or name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@test -x $(BIN)/python || echo "making $(VENV) with $$($(PYTHON) --version); torch takes a few minutes" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,dev]'
	@touch $@
