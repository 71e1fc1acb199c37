# Commands for a fresh machine with Python 3.11+, git and a package index:
#   make quickstart    train a prototypical network with SWBN layers, test it on letters never seen, write a report page
#   make test          lint, type check, tests
#   make docs          build the documentation site in build/site
#   make learn2learn   build learn2learn for this Python and install it (needs a C++ compiler); nothing else needs it
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Touched when the environment matches pyproject.toml, so that a second `make` installs nothing.
STAMP := $(VENV)/.installed

# As published, learn2learn 0.2.0 holds C code that no Python from 3.11 on compiles; Cython makes it anew. That happens in
# an environment of its own, because it takes an older setuptools than torch's.
LEARN2LEARN := 0.2.0
LEARN2LEARN_STAMP := $(VENV)/.learn2learn-$(LEARN2LEARN)
BUILDER := $(VENV)/learn2learn-builder
PIP := -m pip --disable-pip-version-check --quiet

.PHONY: quickstart test test-slow lint docs learn2learn clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/swbn fit --config configs/quickstart.yaml
	$(BIN)/swbn test --config configs/quickstart.yaml --ckpt_path runs/quickstart
	$(BIN)/swbn report runs/quickstart

learn2learn: $(LEARN2LEARN_STAMP)

$(LEARN2LEARN_STAMP): | $(STAMP)
	rm -rf $(BUILDER)
	$(BIN)/python -m venv $(BUILDER)
	$(BUILDER)/bin/python $(PIP) install 'cython<4' 'setuptools<80' wheel packaging
	CYTHON_FORCE_REGEN=1 $(BUILDER)/bin/python $(PIP) wheel --no-deps --use-pep517 --no-build-isolation \
		--config-settings=--global-option=build_ext --wheel-dir $(BUILDER) learn2learn==$(LEARN2LEARN) \
		|| { echo 'make learn2learn: learn2learn $(LEARN2LEARN) could not be built; it takes a C++ compiler and the' \
		'headers of this Python (python3-dev). Everything but the bridge to it works without.' >&2; exit 1; }
	$(BIN)/python $(PIP) install gym scipy requests tqdm
	$(BIN)/python $(PIP) install --no-deps $(BUILDER)/learn2learn-$(LEARN2LEARN)-*.whl
	$(BIN)/python -c 'import learn2learn'
	rm -rf $(BUILDER)
	touch $@

DOCS_STAMP := $(VENV)/.docs

$(DOCS_STAMP): pyproject.toml | $(STAMP)
	$(BIN)/python $(PIP) install -e '.[docs]'
	touch $@

docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build --builder html --fail-on-warning --keep-going --quiet docs build/site

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m 'not slow' -n $(WORKERS) --dist loadscope

test-slow: $(STAMP)
	$(BIN)/pytest -m slow -n $(WORKERS) --dist loadscope

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
