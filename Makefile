# Each target sets up .venv by itself; a second call installs nothing.
PYTHON ?= python3
# of the tests, which wait for kernels and ranks half of their time
WORKERS ?= 4
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport PYTHONPATH PYTHONDONTWRITEBYTECODE

.PHONY: run test test-fast thorough lint bench gpu lab notebooks docs clean setup

run: setup
	$(BIN)/nano run quick

test: setup lint
	$(PYTEST) -m "not thorough" --nbval-lax --nbval-cell-timeout=300 tests notebooks

# Without simulations, kernels, ranks and compilers: under two minutes.
test-fast: setup lint
	$(PYTEST) -m "not notebook and not slow and not thorough" tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# Variants of tests that show once more what others show.
thorough: setup
	$(PYTEST) -m thorough tests

# Ratios measured side by side in one run; nothing in the tests depends on them.
bench: setup thorough
	for script in tests/benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

# The first minutes on an NVIDIA GPU: each line is an assertion; results in outputs/gpu. Without one it says what it would do.
gpu: setup
	$(BIN)/python -m tests.gpu.first_minutes

# JupyterLab on this machine only, with the token that it prints.
lab: setup
	$(BIN)/jupyter lab --ip=127.0.0.1 --notebook-dir=.

# Write the notebooks' parameters from what the experiments declare, and execute them anew, with results that go nowhere else.
notebooks: setup
	$(BIN)/python -m tests.notebooks.parameters
	folder=$$(mktemp -d) && NANOLIB_OUTPUT=$$folder $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
	  $$(ls notebooks/*.ipynb | grep -v summary) notebooks/summary.ipynb && rm -r $$folder

# The API page, from the docstrings whose examples the tests run.
docs: setup
	$(BIN)/python -m docs.api build/api

# Removes what can be made again; results in outputs/ stay.
clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: .venv/complete

.venv/complete: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanolib needs Python 3.11 or newer; run: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --no-compile -r requirements.lock
	@# byte code on all cores, in a third of the time that pip takes; files that are no Python 3 are meant to fail
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@
