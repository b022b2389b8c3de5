# Every target creates .venv if needed. `make PYTHON=python3.13 ...` selects the interpreter.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# 3.12 and 3.11 first: for them a wheel contains a redis-server.
PYTHON ?= $(shell for python in python3.12 python3.11 python3.13 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& { echo $$python; break; }; done)

.PHONY: demo up mesh test test-all test-ci clients containers stores chaos soak fuzz attack parity parity-more classes lint bench bench-scale bench-engine bench-http gpu peers bench-peers clean

demo: $(READY)
	$(BIN)/python -m demo.run

up: $(READY)
	$(BIN)/fusequeue up

# What models of meshes need: 112 MB of wheels. Not for every user: hy3dgen's licence excludes some countries (docs/models/sounds-and-meshes.md).
mesh: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[mesh]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps hy3dgen

# A file's tests run in one process, which starts their servers and models once; files with long tests come first.
PROCESSES := -q -n 3 --dist loadfile --no-loadscope-reorder

# Processes with two threads each compete for two cores: a row of the grid takes 70 s instead of 14.
test test-all test-ci parity-more: export OMP_NUM_THREADS := 1

test: $(READY)
	$(BIN)/pytest $(PROCESSES)

# With the slow tests: compilers, whole benchmarks, attacks, planted bugs, ten thousand jobs.
test-all: $(READY)
	$(BIN)/pytest $(PROCESSES) -m "not gpu and not parity and not parity_more"

# As `make test`; failed tests run once more by themselves.
test-ci: $(READY)
	$(BIN)/python .ci/run_tests.py $(PROCESSES) --durations=50

# Real clients from their registries (docs/clients-tested.md); needs Node.js 20. `make clients ONLY="replicate fal"`.
clients: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m clients $(ONLY)

# The images and the compose file on a container engine (docs/operations/deployment.md). DOCKER is its command.
containers: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m containers

# S3 servers, Redis servers and nginx (docs/stores-tested.md): about seven minutes. `make stores ONLY="s3 redis"`.
stores: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m stores $(ONLY)

# Faults in real processes (docs/reliability.md). `make chaos RUN="kills redis" SEED=7 SCALE=0.1` repeats a plan.
chaos: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m chaos $(RUN) $(if $(SEED),--seed $(SEED)) $(if $(SCALE),--scale $(SCALE))

# A long load, after which memory, keys, connections and files are back: about half an hour. `make soak JOBS=5000` is shorter.
soak: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m soak $(if $(JOBS),--jobs $(JOBS) --warm-up $(JOBS) --signatures 200)

# What no client should send (docs/security.md): five minutes; `make fuzz SECONDS=60 SEED=7 PARTS="openapi images"`.
SECONDS := 300

fuzz: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m fuzz $(PARTS) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# What one tenant waits while another attacks (docs/security.md). `make attack ATTACKS="event-streams large-files"`.
attack: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m attack $(ATTACKS)

# All architectures (docs/compatibility.md). Five of them need the extra `vision`: without it their rows are skipped.
parity: $(READY)
	$(BIN)/pytest -q -m "not gpu and not parity_more" tests/parity --compatibility-page docs/compatibility.md

# Families beyond the listed ones, and random batch mates (docs/compatibility-more.md): some twelve minutes on two cores.
# `make parity-more ROWS=krea-2` replaces the lines of some rows, by part of the name of their tiny pipeline.
parity-more: $(READY)
	$(BIN)/pytest -q $(if $(ROWS),-k "$(ROWS)",-n 2 --dist worksteal) -m "not gpu" tests/parity/more \
		--more-page docs/compatibility-more.md

# Which pipeline classes of the installed diffusers are fused, unfused or not served (docs/pipeline-classes.md).
classes: $(READY)
	$(BIN)/pytest -q tests/parity/test_classes.py --classes-page docs/pipeline-classes.md

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/hadolint compose/Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose/compose.yaml

bench: $(READY)
	for name in simulate swaps merging queue.deadlines fleet engine interactive over_http step_cache checkpoints checkpoint_memory candidates; do $(BIN)/python -m bench.$$name || exit; done

# A million queued jobs (about 4 GB), workers that claim at once, and ten thousand event streams.
bench-scale: $(READY)
	for name in queue queue.contention; do $(BIN)/python -m bench.$$name || exit; done

bench-engine: $(READY)
	$(BIN)/python -m bench.engine

bench-http: $(READY)
	$(BIN)/python -m bench.over_http

# General model servers to compare with, each in an environment of its own (400 MB in all). `make peers PEERS="ray mosec"`.
peers: $(READY)
	$(BIN)/python -m bench.peers --install $(if $(PEERS),--peers $(PEERS))

# Long: ten minutes or more a turn with all peers. Those that are not installed are skipped.
bench-peers: $(READY)
	$(BIN)/python -m bench.peers

# Needs a GPU of 80 GB: correctness, models of real size, the service under load; about 15 minutes. Saves bench/results/gpu.
gpu: $(READY)
	$(BIN)/python -m bench.gpu $(if $(STAGES),--stages $(STAGES))

clean:
	rm -rf $(VENV) .clients .peers .stores .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist

$(READY): pyproject.toml fusequeue/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 with the venv module; \
	apt-get install python3 python3-venv, or set one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@test -x $(BIN)/python || echo "creating $(VENV) with $$($(PYTHON) --version); torch can take a few minutes" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install.py
	@touch $@
