# make run    create .venv with everything and start the desktop
# make test   create .venv and run every check (about 25 minutes on two cores)
# make test-portable  run numeric code as on older processors, and with two threads (half an hour)
# make test-engines DIR=VENV MODEL=FOLDER  compare the plugins with the vLLM or SGLang in the environment VENV
# make check  check format, lint, types and import layers (about a minute)
# make release-check  build wheel and sdist, and try them in clean environments (ARGS="base app": only these)
# make docs   build the documentation into docs/_build/html
# make bench  print the benchmark tables
.DEFAULT_GOAL := help
.PHONY: help setup run test test-portable test-engines test-clients check release-check docs bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvscope-installed
ARGS ?=
# Processes that run tests: one more than there are cores, at most four (each may hold a model).
WORKERS ?= auto
# Python keeps what it compiled, whatever the shell says: tests start hundreds of processes that would do it again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@sed -n 's/^# make /make /p' Makefile

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh $(VENV)
	@touch $@

setup: $(STAMP)

run: $(STAMP)
	@$(BIN)/kvscope $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(STAMP)
	@scripts/test.sh $(BIN) $(WORKERS) $(ARGS)

test-portable: $(STAMP)
	@PYTHON=$(BIN)/python scripts/test_portable.sh $(ARGS)

test-engines: $(STAMP)
	@KVSCOPE_ENGINES="$(DIR)" KVSCOPE_ENGINES_MODEL="$(MODEL)" $(BIN)/python -m pytest -n 0 tests/engines $(ARGS)

test-clients: $(STAMP)
	@test -x .venv-clients/bin/lm_eval || { python3 -m venv .venv-clients && \
		.venv-clients/bin/pip install -q -c constraints.txt -r tests/clients/requirements.txt; }
	@KVSCOPE_CLIENTS="$(CURDIR)/.venv-clients/bin/python" $(BIN)/python -m pytest -n 0 -s tests/clients $(ARGS)

release-check: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/zizmor --quiet --offline .github
	@$(BIN)/hadolint docker/*.Dockerfile
	@$(BIN)/kubernetes-validate --strict --quiet docker/kubernetes/*.yaml
	@$(BIN)/python scripts/check_release.py $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(STAMP)
	$(BIN)/kvscope-engine bench decode
	$(BIN)/kvscope-engine bench memory
	$(BIN)/kvscope-engine bench kv-cache
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.window_smoothness

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
