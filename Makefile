# Run `make` to see what there is. Everything sets itself up in .venv on first use; nothing else is touched.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One acceptance test needs the release of transformers that has the fault.
OLD_ENGINE := .venv-tf517/.ready
PROMETHEUS := .venv-prometheus

# Engines that need an environment of their own, with the set of packages that they were resolved for.
ENGINES ?= vllm sglang
# The torch below them. Elsewhere than on a CPU-only index: make test-engines ENGINE_TORCH="torch==2.13.0 --index-url ..."
ENGINE_TORCH ?= torch==2.13.0

# An interpreter of one's own choice: make test PYTHON=python3.13
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14)

# Extra arguments for what a target runs: make test ARGS="-k mailbox"
ARGS ?=

# Tests download nothing, and the tiny models of the tests run many times slower on more than one thread.
offline := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(READY) ## Serve two small models, clean and then with planted faults, and watch each fault being named
	@$(BIN)/kvcanary demo $(ARGS)

.PHONY: test
test: $(READY) $(OLD_ENGINE) ## Run the tests
	@$(offline) $(BIN)/python -m pytest $(ARGS)

# One test scrapes with a real server. Where none is installed Debian's is unpacked here: nothing is set up or started.
.PHONY: prometheus
prometheus: ## Fetch a Prometheus server for the tests that scrape with one (Debian, Ubuntu)
	@command -v prometheus promtool >/dev/null || test -x $(PROMETHEUS)/usr/bin/prometheus || { \
		mkdir -p $(PROMETHEUS); cd $(PROMETHEUS); \
		if [ "$$(id -u)" = 0 ]; then apt-get update -qq; fi; \
		apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb; \
	}

# Side by side, each in its own environment; each line says whose it is.
.PHONY: test-engines
test-engines: $(READY) ## Run the tests of the vLLM and SGLang adapters, on the released engines (gigabytes of downloads)
	@$(MAKE) --no-print-directory --keep-going --jobs $(words $(ENGINES)) $(ENGINES:%=test-engine-%)

.PHONY: $(ENGINES:%=test-engine-%)
$(ENGINES:%=test-engine-%): test-engine-%: .venv-%/.ready
	@$(offline) .venv-$*/bin/python -m pytest -m "" tests/engines/$* $(ARGS) 2>&1 | sed --unbuffered 's/^/$*: /'

.PHONY: gpu
gpu: $(READY) ## Run on a CUDA device what only one can show: tests, self-test, sanitizers, demo, then the bench
	@.ci/gpu checks && .ci/gpu bench

.PHONY: soak
soak: $(READY) ## Serve thousands of requests in every engine mode, watched: nothing may be found
	@$(offline) $(BIN)/python -m tests.engines.soak $(ARGS)

.PHONY: programs
programs: $(READY) ## Random programs on the simulated engine, judged by its oracle: make programs ARGS="--programs 20000"
	@$(offline) $(BIN)/python -m tests.simulated.search $(ARGS)

.PHONY: mutations
mutations: $(READY) ## Remove each check from a copy, and see that a test fails: make mutations ARGS="--only DIGEST"
	@$(BIN)/python -m tests.mutations $(ARGS)

.PHONY: bench
bench: $(READY) ## Measure what the canary costs on this machine: make bench ARGS="--quick"
	@$(BIN)/kvcanary bench $(ARGS)

.PHONY: coverage
coverage: $(READY) ## Run the tests and show the lines and branches they miss
	@$(offline) $(BIN)/coverage run -m pytest $(ARGS)
	@$(BIN)/coverage report

.PHONY: lint
lint: $(READY) ## Check style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --project pyproject.toml
	$(BIN)/lint-imports

.PHONY: format
format: $(READY) ## Repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs-check
docs-check: $(READY) ## Run the examples of the documentation and follow its links
	@$(offline) $(BIN)/python -m pytest tests/docs $(ARGS)

.PHONY: clean
clean: ## Remove the environment, caches and builds
	@rm -rf $(VENV) .venv-* dist build .coverage .coverage.* htmlcov .hypothesis \
		.mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(OLD_ENGINE): $(READY) tests/engines/make_env.py
	@$(BIN)/python tests/engines/make_env.py 5.17.0 .venv-tf517 >/dev/null
	@touch $@

.venv-%/.ready: tests/engines/requirements-%.txt pyproject.toml | $(READY)
	@echo "Installing $* into .venv-$*; this takes some minutes and gigabytes"
	@pip=".venv-$*/bin/python -m pip install -qq --disable-pip-version-check"; \
	$(BIN)/python -m venv --clear .venv-$* && \
	$$pip $(ENGINE_TORCH) && \
	$$pip --no-deps --requirement $< && \
	$$pip --constraint $< pytest pytest-timeout structlog trio hypothesis && \
	$$pip --no-deps --editable . || { \
		echo "The environment of $* cannot be built, so its adapter was not tested; see what pip says above" >&2; exit 1; }
	@touch $@

# A candidate counts only if it starts: version managers leave launchers behind for versions they do not have.
$(READY): pyproject.toml constraints.txt
	@usable='import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'; \
	if ! $(BIN)/python -c "$$usable" 2>/dev/null; then \
		for python in $(PYTHONS) ''; do \
			if [ -n "$$python" ] && "$$python" -c "$$usable" 2>/dev/null; then break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "kvcanary needs Python 3.11 or newer with its venv module; tried: $(PYTHONS)." >&2; \
			echo "Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
			exit 1; \
		fi; \
		echo "Creating $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv --clear $(VENV); \
	fi
	@echo "Installing kvcanary and its tools into $(VENV); the first time this takes a few minutes"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
