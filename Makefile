# Two commands do everything: `make serve` sets up and serves, `make test` sets up and tests.
# PORT=, ARGS= and PIP_ARGS= pass through: `make serve PORT=9000 ARGS="--max-num-seqs 8"`.

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
ARGS   ?=
PIP     = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: serve test soak check bench
serve: $(VENV)/.core
	$(VENV)/bin/moe-serve --port $(PORT) $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(ARGS)

soak: $(VENV)/.dev
	$(VENV)/bin/python -m tests.soak $(ARGS)

check: $(VENV)/.dev
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/check

bench: $(VENV)/.dev
	$(VENV)/bin/python -m benchmarks.bench_cpu $(ARGS)

# Stamps: pip runs again only when the pins or the dependency lists change, and then without a network if nothing is new.
# setuptools first and no build isolation, so that building the project itself asks no package index.
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@
