# Everything starts here. `make up` and `make test` need Python 3.11 or later, and nothing else that runs already.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -c ops/constraints.txt
# Arguments of `baton up`, as in `make up ARGS="--decode 2 --port 8080"`.
ARGS   ?=
# How many simulated clusters `make sim` runs.
SEEDS  ?= 2000

# Idle compute threads sleep: a laptop runs several workers on the same cores.
export OMP_WAIT_POLICY := PASSIVE
export KMP_BLOCKTIME := 0
export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help install up test lint types sim e2e clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+%?:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  make bench-NAME runs one benchmark and writes benchmarks/results/NAME.json'

install: $(VENV)/.installed ## .venv with all that serving needs

up: $(VENV)/.installed ## a cluster on 127.0.0.1:8000; ARGS="--decode 2" for more
	@exec $(BIN)/baton up $(ARGS)

test: lint types ## what CI runs: lint, types, import contracts, every test that is not marked slow, and the simulation
	@nice -n 19 $(BIN)/python -m tests.sim --seeds 2000 --jobs 1 > $(VENV)/sim.log 2>&1 & simulation=$$!; \
	echo 'the simulation runs beside the tests, on what they leave of the cores; its table comes after theirs'; \
	$(BIN)/python -m pytest -m "not slow" tests; tests=$$?; \
	wait $$simulation; simulation=$$?; cat $(VENV)/sim.log; exit $$((tests | simulation))

lint: $(VENV)/.installed-dev ## ruff, the import contracts, and whether the diagrams of the machines are up to date
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python ops/gen_machines.py --check

types: $(VENV)/.installed-dev ## mypy --strict
	$(BIN)/mypy

sim: $(VENV)/.installed-dev ## the whole cluster on virtual time under faults; SEEDS=100000 for more
	$(BIN)/python -m tests.sim --seeds $(SEEDS) $(ARGS)

e2e: $(VENV)/.installed-dev ## real processes, the slow tests included
	$(BIN)/python -m pytest tests/e2e

bench-%: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(ARGS)

clean: ## removes .venv, caches and the files of local clusters
	rm -rf $(VENV) .baton build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or later; say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: no other requirement may pull another build of it.
$(VENV)/.installed: pyproject.toml ops/constraints.txt | $(BIN)/python
	@echo 'Installing what serving needs into $(VENV) (a few minutes the first time) …'
	@$(PIP) torch
	@$(PIP) -e '.[gateway,engine]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo 'Installing what the tests need into $(VENV) …'
	@$(PIP) -e '.[gateway,engine,dev]'
	@touch $@
