# From a fresh clone, `make demo` and `make test` need nothing but a Python and a C++ compiler.
# PYTHON chooses the interpreter .venv is made from; PYTEST_FLAGS is passed on (`make test PYTEST_FLAGS="-n 2"`).

PYTHON ?= python3
PYTEST_FLAGS ?= -n 2
BENCH_FLAGS ?= --json benchmarks/results/$(shell date +%F).json --plot benchmarks/results

VENV := .venv
RUN := $(VENV)/bin/python
PIP_INSTALL := $(RUN) -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

# torch's load_inline finds ninja on PATH.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help env demo test gpu-test lint format bench bench-cpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

env: $(VENV)/.installed  ## create .venv with the versions of constraints.txt

# torch first and by its exact version, so that no later request can choose another build of it.
# No build isolation: the pinned setuptools builds fusegen, and nothing is downloaded a second time.
$(VENV)/.installed: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("fusegen needs Python 3.11 or later; choose one with PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) setuptools $(TORCH)
	$(PIP_INSTALL) --no-build-isolation --editable '.[test,dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP_INSTALL) --no-build-isolation --editable '.[bench]'
	@touch $@

demo: env  ## run the first example
	$(RUN) examples/conv3d_gelu.py

test: env  ## run every test that needs no GPU
	$(RUN) -m pytest -m "not gpu" $(PYTEST_FLAGS)

gpu-test: env  ## run the tests that need an NVIDIA GPU
	$(RUN) -m pytest -m gpu $(PYTEST_FLAGS)

lint: env  ## ruff, ruff format and mypy, as pre-commit and CI run them
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --strict fusegen

format: env  ## let ruff fix what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(VENV)/.installed-bench  ## measure everything; BENCH_FLAGS chooses
	$(RUN) -m fusegen bench $(BENCH_FLAGS)

bench-cpu: env  ## print the quick CPU ratios
	$(RUN) -m fusegen bench --quick --device cpu

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
