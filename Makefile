# `make` alone lists the targets. Everything runs from .venv, which `make setup` creates.

PYTHON3 ?= python3
# More options for pip, for instance PIP_FLAGS=--prefer-binary
PIP_FLAGS ?=
# More options for pytest or imece train: make test ARGS="-k mesh -x", make train ARGS="--steps 2000"
ARGS ?=
# Processes that `make test` runs tests in, each of which starts ranks; 0: in its own, one after another
JOBS ?= 2
# Of `make soak`
KILLS ?= 200
# Of `make test-torch`, for instance TORCH=2.11.0
TORCH ?=
# `make test-gpu PYTHON=python3` uses a Python that already has a CUDA build of torch; so does bench-gpu.
PYTHON ?= .venv/bin/python

VENV_PYTHON := .venv/bin/python
# Hundreds of ranks that compile what they import would take a fifth of the tests' time.
PYTEST_OF = PYTHONDONTWRITEBYTECODE= $(1) -m pytest
PYTEST := $(call PYTEST_OF,$(VENV_PYTHON))
QUICK := -n $(JOBS) -m "not gpu and not slow and not faults"
SETUP_STAMP := .venv/.imece-setup
BENCH_STAMP := .venv/.imece-bench

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all faults test-gpu test-torch lint format bench bench-gpu soak clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(SETUP_STAMP)  ## create or refresh .venv (Python 3.11 or newer is all it needs)

$(SETUP_STAMP): pyproject.toml constraints.txt
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "imece: needs Python 3.11 or newer; name one: make setup PYTHON3=python3.11" >&2; exit 1; }
	@$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON3) -m venv --clear .venv
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		-c constraints.txt -e '.[dev]'
	@touch $@

train: setup  ## the main job: train a small language model, 3 to 6 minutes on two cores; again: go on
	$(VENV_PYTHON) -m imece train $(ARGS)

test: setup  ## the tests that need no GPU and are not slow
	$(PYTEST) $(QUICK) $(ARGS)

# Which versions other packages have is as in constraints.txt; torch has requirements of its own.
test-torch: OTHER := build/torch-$(TORCH)-$(notdir $(PYTHON3))
test-torch:  ## the same with another torch, in build/: make test-torch TORCH=2.11.0 PYTHON3=python3.13
	@test -n "$(TORCH)" || { echo "imece: which one? make test-torch TORCH=2.11.0" >&2; exit 2; }
	$(PYTHON3) -m venv $(OTHER)
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		-c $(OTHER)/constraints.txt 'torch==$(TORCH)' -e '.[dev]'
	$(call PYTEST_OF,$(OTHER)/bin/python) $(QUICK) $(ARGS)

test-all: setup  ## the slow tests too
	$(PYTEST) -m "not gpu" $(ARGS)

faults: setup  ## kill and stop ranks at many places and instants; prints what each run survived
	$(PYTEST) -m faults -s $(ARGS)

test-gpu:  ## the tests on CUDA devices; fails where there is none
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo "imece: $(PYTHON) sees no CUDA device (or has no torch); name another with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import hypothesis, psutil, pytest, rich, safetensors, tokenizers, tyro' || \
		{ echo "imece: $(PYTHON) lacks what the tests need: $(PYTHON) -m pip install -e '.[dev]' (its torch stays)" >&2; \
		exit 1; }
	PYTHONPATH=$(CURDIR)/src $(PYTHON) -m pytest -m gpu $(ARGS)

lint: setup  ## ruff and strict mypy
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: setup  ## let ruff format and mend what it can
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

# MPICH is one of the things to compare with; where it cannot be installed, its column stays empty.
$(BENCH_STAMP): $(SETUP_STAMP)
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		-c constraints.txt mpi4py mpich || echo "imece: no MPICH here; the comparison goes on without it"
	@touch $@

bench: setup $(BENCH_STAMP)  ## measure the collectives; figures go to build/bench/
	@mkdir -p build/bench
	$(VENV_PYTHON) -m imece bench collectives --ranks 2,4 \
		--json build/bench/collectives.json --plot build/bench/collectives.png
	$(VENV_PYTHON) -m imece bench hosts --json build/bench/hosts.json
	$(VENV_PYTHON) -m imece bench pipeline --json build/bench/pipeline.json
	$(VENV_PYTHON) -m imece bench tensor --json build/bench/tensor.json
	$(VENV_PYTHON) -m imece bench step --memory --json build/bench/step.json \
		--plot build/bench/step.png --trace build/bench/step-trace.json
	$(VENV_PYTHON) -m imece bench step --parameters 1000,10000
	$(VENV_PYTHON) -m imece bench step --strategy all --memory --json build/bench/strategies.json
	$(VENV_PYTHON) -m imece bench memory --json build/bench/memory.json --plot build/bench/memory.png
	$(VENV_PYTHON) -m imece bench save --json build/bench/save.json
	$(VENV_PYTHON) -m imece bench recovery --json build/bench/recovery.json
	$(VENV_PYTHON) -m imece bench train --json build/bench/train.json

bench-gpu:  ## measure one GPU (ARGS="--model small" for a smaller one); build/bench/gpu.json
	PYTHONPATH=$(CURDIR)/src $(PYTHON) -m imece bench gpu --json build/bench/gpu.json $(ARGS)

soak: setup  ## kill a rank of a training every 15 s, KILLS=200 times (about 50 minutes); prints the goodput
	@mkdir -p build/bench
	$(VENV_PYTHON) -m imece bench recovery --parts kills --strategies replicate --kills $(KILLS) \
		--every-s 15 --json build/bench/soak.json

clean:  ## remove what was built, .venv excepted
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
