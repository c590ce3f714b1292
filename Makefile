# make swarm   install into .venv, then train one model with five processes on this machine
# make test    formatting, lint, types and the whole test suite
# make docs    write docs/cli.md again from --help
# make wire    write peer/wire/ again from proto/
# make clean   remove what the above made
#
# PYTHON=python3.12 picks another Python (3.11 or newer); ARGS="--peers 2" goes to `peer swarm`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

FITS = -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p $(FITS) 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# The oldest protoc that pyproject.toml allows for: newer runtimes accept what it writes, the reverse fails.
PROTOC := grpcio-tools==1.70.0 setuptools<81

.PHONY: swarm test docs wire clean

swarm: $(VENV)/installed
	@$(BIN)/peer swarm $(ARGS)

test: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

docs: $(VENV)/installed-dev
	$(BIN)/python -m peer.cli.reference > docs/cli.md

wire:
	$(PYTHON) -m venv --clear build/wire
	build/wire/bin/pip install -q $(foreach requirement,$(PROTOC),'$(requirement)')
	build/wire/bin/python -m grpc_tools.protoc -Ipeer/wire=proto \
		--python_out=. --pyi_out=. --grpc_python_out=. peer/wire/peer.proto

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------ the virtual environment

$(VENV)/installed: what := .
$(VENV)/installed-dev: what := .[dev]

# Both are one environment; it is filled again when the dependencies change, and made anew when its pip does not work.
$(VENV)/installed $(VENV)/installed-dev: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" $(FITS); then \
		echo "peerloom needs Python 3.11 or newer; name yours: make PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@echo "installing into $(VENV) (some minutes and gigabytes the first time):"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
		-c constraints.txt -e '$(what)' 2>&1 | tee $(VENV)/install.log | while read -r verb name rest; do \
		case "$$verb $$name" in \
			Collecting\ *) printf '%s ' "$${name%%[!A-Za-z0-9_.-]*}" ;; \
			Installing\ collected) printf '\nunpacking ... ' ;; \
		esac; done || { echo failed; grep -v '^WARNING' $(VENV)/install.log | tail -n 20; exit 1; } >&2
	@echo done
	@touch $(VENV)/installed $@
