# Two commands do everything: `make atari57` and `make test` make .venv if there is none, install
# what is missing, and run. ARGS are passed on: make atari57 ARGS="total_frames=200_000"

VENV ?= .venv
PYTHON ?=
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.PHONY: atari57 test lint check install
.DELETE_ON_ERROR:

# exec: Ctrl-C reaches the program and not a shell around it, and make waits for it to end.
atari57: $(INSTALLED)
	@exec $(BIN)/python launch.py suite=atari57 $(ARGS)

test: $(INSTALLED)
	@exec $(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

check: lint test

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

$(BIN)/python:
	@for python in $(PYTHONS); do \
	    if $$python -c '$(USABLE)' 2>/dev/null; then exec $$python -m venv $(VENV); fi; \
	done; \
	echo "make: no Python 3.11, 3.12 or 3.13 with venv among: $(PYTHONS)." >&2; \
	echo "make: install one, or say where it is: make PYTHON=/path/to/python3 ..." >&2; \
	exit 1
