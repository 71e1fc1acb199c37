# Two commands for a fresh machine with Python 3.11+, git and a package index:
#   make quickstart    train a prototypical network with SWBN layers, test it on letters never seen, write a report page
#   make test          lint, type check, tests
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Touched when the environment matches pyproject.toml, so that a second `make` installs nothing.
STAMP := $(VENV)/.installed

.PHONY: quickstart test test-slow lint clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/swbn fit --config configs/quickstart.yaml
	$(BIN)/swbn test --config configs/quickstart.yaml --ckpt_path runs/quickstart
	$(BIN)/swbn report runs/quickstart

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m 'not slow' -n $(WORKERS) --dist loadscope

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
