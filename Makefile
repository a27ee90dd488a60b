# `make lab` opens the course, `make test` proves it. README has the same in plain pip and python.
VENV := .venv
BIN := $(VENV)/bin
OUT ?= figures
# The first interpreter that is really there and new enough.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,12))' 2>/dev/null && echo $$p && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: lab test quick notebooks figures cuda lint clean

$(VENV)/.ready: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 found. Install one, or say which: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@touch $@

lab: $(VENV)/.ready
	$(BIN)/python -m minillm lab

UNIT := -m pytest -q -n 2 --dist worksteal --ignore=tests/notebooks --ignore=tests/browser
# What failed beside other tests gets one more try, alone: a machine that was busy is no fault of the code.
AGAIN := -m pytest -q --last-failed --last-failed-no-failures none
NBVAL := -m pytest -q --nbval-lax --nbval-current-env --nbval-cell-timeout=180 -p no:cacheprovider

# nbval runs every notebook in a kernel; the strict harness judges what its checks recorded, and tries every exercise.
test: quick
	$(BIN)/python $(UNIT) -m slow || \
		$(BIN)/python $(AGAIN) -m slow --ignore=tests/notebooks --ignore=tests/browser
	records=$$(mktemp -d) && trap 'rm -rf "$$records"' EXIT && \
	MINILLM_PROGRESS=$$records/unsolved.json $(BIN)/python $(NBVAL) labs && \
	MINILLM_PROGRESS=$$records/solved.json MINILLM_STRICT=1 $(BIN)/python $(NBVAL) solutions && \
	export MINILLM_RECORDS=$$records && \
	{ $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/notebooks || $(BIN)/python $(AGAIN) tests/notebooks; } && \
	{ $(BIN)/python -m pytest -q tests/browser || $(BIN)/python $(AGAIN) tests/browser; }

quick: $(VENV)/.ready lint
	$(BIN)/python $(UNIT) -m "not slow" || \
		$(BIN)/python $(AGAIN) -m "not slow" --ignore=tests/notebooks --ignore=tests/browser

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell minillm course docs README.md CONTRIBUTING.md

notebooks: $(VENV)/.ready
	$(BIN)/python -m minillm notebooks

figures: $(VENV)/.ready
	$(BIN)/python -m minillm figures --out $(OUT)

# Correctness first; with a GPU also the benchmark tables and this machine's card, kept under OUT.
cuda: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m cuda tests
	@$(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || \
		{ echo "torch finds no GPU here: the checks above were skipped, nothing was measured"; exit 0; } && \
		mkdir -p $(OUT) && \
		$(BIN)/python -m minillm machine --refresh --json $(OUT)/cuda_machine.json && \
		$(BIN)/python -m minillm bench comm --json $(OUT)/cuda_bench_comm.json && \
		$(BIN)/python -m minillm bench step --json $(OUT)/cuda_bench_step.json && \
		$(BIN)/python -m minillm bench attention --json $(OUT)/cuda_bench_attention.json && \
		$(BIN)/python -m minillm bench serve --json $(OUT)/cuda_bench_serve.json && \
		$(BIN)/python -m minillm bench speculate --json $(OUT)/cuda_bench_speculate.json

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis test-artifacts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
