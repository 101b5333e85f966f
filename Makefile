# `make sweep` and `make test` set up what they need: Python 3.11+ with venv is all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= auto
ARGS ?=

.PHONY: sweep test lint wheel-check bench clean

sweep: $(VENV)/.run
	$(BIN)/simmoe sweep --trace azure --mu 16 --sigma 5 $(ARGS)

test: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel-check: $(VENV)/.dev
	$(BIN)/python -m tests.wheel_check

bench: $(VENV)/.run
	$(BIN)/python benchmarks/run.py $(ARGS)

$(VENV)/.run: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(f"simmoe needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]} (make PYTHON=python3.12 ...)" if not (3, 11) <= sys.version_info[:2] <= (3, 13) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
