# Octavo from a fresh clone: needs Python 3.11 or newer and make; everything else goes into .venv.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
FRAMEWORKS := .venv-frameworks
LOWEST := .venv-lowest
MODEL ?=
ARGS ?=

# Tests of one file share checkpoints and servers.
PYTEST_FLAGS := --numprocesses auto --maxprocesses 4 --dist loadfile
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)
# They use each of the dependencies, and need no transformers. A feature's folder may have been deleted.
LOWEST_TESTS := tests/test_imports.py $(wildcard $(addprefix tests/unit/,server hub cli features/grammar features/pooling))

# Tests start many processes, each of which would compile the package for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve chat test test-all lowest deletion check types rules clients format bench clean

help: ## list the targets
	@echo "Octavo: make TARGET"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{printf "%-10s %s\n", $$1, $$2}'

install: $(VENV)/.ready-all ## install what all other targets need at once, instead of what each needs

serve: $(VENV)/.ready-run ## install and serve a model: make serve MODEL=smollm2 ARGS="--port 9000"
	@exec $(BIN)/octavo serve $(MODEL) $(ARGS)

chat: $(VENV)/.ready-run ## install and talk to a model in the terminal
	@exec $(BIN)/octavo chat $(ARGS)

test: $(VENV)/.ready-test ## install and run the tests: make test ARGS="tests/unit -k pool"
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.ready-test ## nightly: also the tests marked slow
	NIGHTLY_TESTS=1 $(PYTEST) -m '' $(ARGS)

lowest: $(LOWEST)/.ready ## nightly: some of the tests with the lowest versions of dependencies that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest $(PYTEST_FLAGS) $(or $(ARGS),$(LOWEST_TESTS))

deletion: $(VENV)/.ready-test ## the quick tests with each feature's folder deleted: some minutes for each; ARGS=--short for a few of them
	$(BIN)/python tools/deletion.py $(ARGS)

check: $(VENV)/.ready-lint ## linters, types, import floors, file sizes, names of features
	@$(MAKE) --no-print-directory --jobs 2 types rules

types: $(VENV)/.ready-lint
	$(BIN)/mypy

rules: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/sz.py
	$(BIN)/python tools/deletion.py --static

clients: $(VENV)/.ready-run $(CLIENTS)/.ready $(FRAMEWORKS)/.ready ## nightly: third-party clients and a fuzzer against a live server
	$(BIN)/python conformance/run.py $(CLIENTS) $(FRAMEWORKS) $(if $(MODEL),--model $(MODEL)) $(ARGS)

format: $(VENV)/.ready-lint ## let ruff format the code and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready-test ## compare with sequential serving and transformers on this machine (some minutes)
	$(BIN)/python benchmarks/cpu_batching.py $(ARGS)

clean: ## remove the environments, caches and build products (models stay in Octavo's cache folder)
	rm -rf $(VENV) $(CLIENTS) $(FRAMEWORKS) $(LOWEST) build dist *.egg-info .pytest_cache .hypothesis .schemathesis .benchmarks .mypy_cache .ruff_cache .import_linter_cache
	find octavo tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of dependencies: newer than its inputs means installed, and pip is not called.
$(VENV)/.ready-run: $(VENV)/.made pyproject.toml constraints.txt
	@sh tools/install.sh $(VENV) $@ .

$(VENV)/.ready-test: $(VENV)/.made pyproject.toml constraints.txt
	@sh tools/install.sh $(VENV) $@ ".[test]"
	@touch $(VENV)/.ready-run

$(VENV)/.ready-all: $(VENV)/.made pyproject.toml constraints.txt
	@sh tools/install.sh $(VENV) $@ ".[lint,test]"
	@touch $(VENV)/.ready-run $(VENV)/.ready-lint $(VENV)/.ready-test

$(VENV)/.ready-lint: $(VENV)/.made pyproject.toml constraints.txt
	@sh tools/install.sh $(VENV) $@ ".[lint]"
	@touch $(VENV)/.ready-run

# The clients live apart: packages among them change how pytest runs. So do frameworks, which want older clients.
$(CLIENTS)/.ready: conformance/requirements.txt
$(FRAMEWORKS)/.ready: conformance/frameworks/requirements.txt
$(CLIENTS)/.ready $(FRAMEWORKS)/.ready:
	@test -x $(@D)/bin/python || sh tools/make_venv.sh $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -r $<
	@touch $@

# The lowest Python, too: the lowest versions have no builds for newer ones.
$(LOWEST)/.ready: pyproject.toml constraints.txt tools/lowest.py
	@test -x $(@D)/bin/python || PYTHON=$(or $(PYTHON),python3.11) sh tools/make_venv.sh $(@D)
	$(@D)/bin/python tools/lowest.py > $(@D)/lowest.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -r $(@D)/lowest.txt -e .
	@touch $@

$(VENV)/.made:
	@sh tools/make_venv.sh $(VENV)
	@touch $@
