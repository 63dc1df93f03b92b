# Two commands do everything: `make serve` sets up and serves, `make test` sets up and tests, in JOBS processes.
# What takes minutes has a target of its own, of which `make test` runs a short pick: `make kernels` (Triton kernels in the
# interpreter, and compiled for every GPU), `make ranks` (models and engines of several processes), `make soak` (unruly clients for long) and
# `make evals` (the bundled model answers all its questions, and lm-eval, which uv installs for itself, asks it too).
# `make processes` starts services and engines that end, hang or wait in more ways than `make test` has time for.
# `make api-workers` runs the suites of the HTTP side with two HTTP processes, of which `make test` runs a pick too.
# `make browser` uses the page at / in a headless Chromium, which the system must have.
# `make balancer` ends replicas behind HAProxy, which the system must have, under load.
# `make manifests` has Helm, Kubernetes' schemas, systemd and Prometheus check deploy/; `make ray` runs replicas under Ray
# Serve. uv installs Helm and Ray into environments of their own.
# `make boards` has a real Prometheus, which the system must have, ask all that deploy/grafana.json asks.
# `make clients` runs popular clients, which uv installs into environments of their own, against the real service.
# `make pages` writes the pages of docs/ that are made from code and records; `make docs` builds the site.
# PORT=, ARGS=, EXTRAS= and PIP_ARGS= pass through: `make serve PORT=9000 EXTRAS=gpu ARGS="--max-num-seqs 8"`.

PYTHON ?= python3
VENV   ?= .venv
CLIENTS = .venv-clients
BROWSER = .venv-browser
LM_EVAL = .venv-lm-eval
PORT   ?= 8000
ARGS   ?=
JOBS   ?= 3
EXTRAS ?=
PIP     = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
# Compiled files are kept whatever the environment says: pytest would rewrite the asserts of every test file again, and
# every process of a rank would compile all it imports.
PYTEST  = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
SERVE   = $(VENV)/.serve$(EXTRAS:%=-%)

API_WORKER_TESTS = $(patsubst %,tests/server/test_%.py,api_workers asker chat client_requests completions cors disconnect \
	errors http11 large_bodies life operations protocol queue_speed stall start)

# Only the files with such tests are imported: in every process that takes longer than many of these tests.
PROCESSES_TESTS = $(if $(filter tests/%,$(ARGS)),,$(sort $(shell grep -rl --include='test_*.py' 'mark.processes' tests)))

.PHONY: serve test test-cpus processes kernels ranks evals api-workers browser balancer boards manifests ray clients soak check pins pages docs bench
serve: $(SERVE)
	$(VENV)/bin/moe-serve --port $(PORT) $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) $(ARGS)

evals: $(LM_EVAL)/.installed
	$(PYTEST) -m evals $(ARGS)

# The services of these tests then have two HTTP processes: threads of the test, or processes where it starts some.
# All tests of these files run, also those that `make processes` runs with one.
api-workers: $(VENV)/.dev
	API_WORKERS=2 $(PYTEST) -m "" $(API_WORKER_TESTS) $(ARGS)

processes: $(VENV)/.dev
	$(PYTEST) -m processes $(PROCESSES_TESTS) $(ARGS)

kernels: $(VENV)/.dev
	$(PYTEST) -m kernels $(ARGS)

ranks: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -m ranks $(ARGS)

test-cpus: $(VENV)/.dev
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/test_on_every_cpu $(ARGS)

clients: $(CLIENTS)/.installed
	$(VENV)/bin/python -m pytest -m '' tests/clients $(ARGS)

browser: $(BROWSER)/.installed
	$(VENV)/bin/python -m pytest -m browser tests/browser $(ARGS)

balancer: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m balancer tests/balancer $(ARGS)

manifests ray: %: .venv-%/.installed
	$(VENV)/bin/python -m pytest -m $@ tests/$@ $(ARGS)

boards: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m boards tests/boards $(ARGS)

soak: $(VENV)/.dev
	$(VENV)/bin/python -m tests.soak $(ARGS)

check: $(VENV)/.dev
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/check

pins: $(VENV)/.dev
	$(VENV)/bin/python scripts/check_pins.py

pages: $(VENV)/.dev
	$(VENV)/bin/python -m scripts.write_settings_page
	$(VENV)/bin/python -m scripts.write_paths_page
	$(VENV)/bin/python -m scripts.write_results_page

docs: $(VENV)/.dev
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(PYTHON)" scripts/docs

bench: $(VENV)/.dev
	$(VENV)/bin/python -m benchmarks.bench_cpu $(ARGS)

# Stamps: pip runs again only when the pins or the dependency lists change; if nothing is new, it needs no network.
$(SERVE): pyproject.toml constraints.txt
	$(call install,$(EXTRAS))
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(call install,dev)
	@touch $@

$(LM_EVAL)/.installed: $(VENV)/.dev scripts/lm_eval_environment $(wildcard evals/environment/*)
	@echo "Installing lm-eval into $(LM_EVAL); the first time this takes minutes"
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(PYTHON)" scripts/lm_eval_environment
	@touch $@

$(CLIENTS)/.installed: $(VENV)/.dev scripts/clients $(wildcard tests/clients/pins/*)
	@echo "Installing clients into $(CLIENTS); the first time this takes minutes"
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(PYTHON)" scripts/clients
	@touch $@

.venv-manifests/.installed .venv-ray/.installed: .venv-%/.installed: $(VENV)/.dev scripts/deploy_tools $(wildcard tests/*/pins/*)
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(VENV)/bin/python" scripts/deploy_tools $*
	@touch $@

$(BROWSER)/.installed: $(VENV)/.dev scripts/browser $(wildcard tests/browser/pins/*)
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(VENV)/bin/python" scripts/browser
	@touch $@

# An interrupted installation may leave half a package, so it also leaves a mark, and the next one starts over.
# We install setuptools first and build without isolation, so that building the project itself asks no package index.
MARK = $(VENV)/.interrupted
define install
	@test -e $(VENV)/pyvenv.cfg -a ! -e $(MARK) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "moe-serve needs Python 3.11 or newer; $(PYTHON) is older or missing: make PYTHON=python3.12" >&2; exit 1; }
	@test ! -e $(VENV)/pyvenv.cfg -o ! -e $(MARK) || $(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(VENV) && touch $(MARK)
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { rm $(MARK); exit 1; }
	@echo "Installing into $(VENV); the first time this downloads torch: README.md says how much, and how to get CPU builds"
	@{ $(PIP) torch setuptools && $(PIP) --no-build-isolation -e '.$(1:%=[%])'; } || { rm $(MARK); exit 1; }
	@rm $(MARK)
endef
