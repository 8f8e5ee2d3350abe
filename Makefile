# Two commands: `make run` (the main job) and `make test`. Both make their own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN_READY := $(VENV)/.run-ready
TEST_READY := $(VENV)/.test-ready
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: run test lint format clean

run: $(RUN_READY)
	$(BIN)/serving-conv replay --check $(ARGS)

test: $(TEST_READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations=15 $(ARGS)

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(RUN_READY): pyproject.toml requirements-cpu.txt
	@echo "Setting up $(VENV): torch and a few small packages (about a minute when they are at hand)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements-cpu.txt
	$(PIP) --editable '.[plot]'
	@touch $@

$(TEST_READY): $(RUN_READY)
	@echo "Adding the test tools to $(VENV)"
	$(PIP) --editable '.[dev]'
	@touch $@
