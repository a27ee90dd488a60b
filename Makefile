# `make lab` opens the course, `make test` proves it, `make full` proves the rest. README and CONTRIBUTING have
# the same in plain pip and python.
VENV := .venv
BIN := $(VENV)/bin
OUT ?= figures
# The first interpreter that is really there and new enough.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,12))' 2>/dev/null && echo $$p && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE # images set it, and every kernel and rank would compile the package anew

.PHONY: setup lab test full mutants quick notebooks figures book wheel cuda lint clean

$(VENV)/.ready: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 found. Install one, or say which: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@touch $@

$(VENV)/.book: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --editable .[book]
	@touch $@

setup: $(VENV)/.ready

lab: $(VENV)/.ready
	$(BIN)/python -m minillm lab

PYTEST := $(BIN)/python -m pytest -q
# $(call pytest,WHAT): what failed beside other tests (status 1) gets one more try, alone and with what was drawn for it:
# a machine that was busy is no fault of the code.
pytest = $(PYTEST) $(1) || { test $$? -eq 1 && $(PYTEST) -n 0 --last-failed --last-failed-no-failures none $(1); }

# A newcomer's proof: what a plain `pytest` runs, after lint.
test: lint
	$(call pytest)

# What `make test` leaves out. PROOF=all runs everything, and more of all that is drawn or counted; that takes hours.
full: $(VENV)/.ready $(VENV)/.book
	$(if $(PROOF),export MINILLM_PROOF=$(PROOF); )$(call pytest,$(if $(PROOF),,-m full))

# Every mutant, cheat and right variant of every exercise's answer against its check; goes on where it stopped.
mutants: $(VENV)/.ready
	$(BIN)/python -m tests.course.attack $(LABS)

# While you work: no notebook, no exercise.
quick: lint
	$(call pytest,tests/engine tests/bench)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell minillm course docs README.md CONTRIBUTING.md CHANGELOG.md

notebooks: $(VENV)/.ready
	$(BIN)/python -m minillm notebooks

figures: $(VENV)/.ready
	$(BIN)/python -m minillm figures --out $(OUT)

# The course as a website, in build/book/html; nothing is executed for it.
book: $(VENV)/.book
	$(BIN)/python -m course.book

# The package without its course, in build/wheel.
wheel: $(VENV)/.ready
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .

# What needs GPUs, on as many as there are, in about a quarter of an hour: minillm/bench/cuda.py says which parts. With
# results under figures/ the page is made anew; `make cuda OUT=/elsewhere` leaves both alone.
cuda: $(VENV)/.ready
	@$(BIN)/python -m minillm.bench.cuda --out $(OUT); status=$$?; \
		$(if $(filter figures,$(OUT)),$(BIN)/python -m minillm.bench.gpu_page;) exit $$status

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis test-artifacts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
