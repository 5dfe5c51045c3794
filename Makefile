# Everything runs in .venv, installed with the versions of constraints.txt.
#   make up      install, fetch the starter model, serve it in the foreground
#   make test    all tests      make check   lint, types, import rules, unit tests
#   make bench   measure        make long    tests that take hours
# ARGS="…" is handed on: make up ARGS="--port 9000", make test ARGS="-k relay".

# The first that runs and is new enough: a version manager's shim may exist for a Python that does not.
IS_NEW_ENOUGH := import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
  if $$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then echo $$python; break; fi; done)
ARGS ?=
# Tests mostly wait for the processes they start; a file's tests stay together and in order. The files of
# pyproject.toml's first folder take the longest: whoever is done first has short ones left to do.
JOBS ?= 3
PYTEST := .venv/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Plain mlx has a backend on macOS only; elsewhere the driver's device tells which one to take.
ifeq ($(shell uname -s),Darwin)
BACKEND :=
else ifneq ($(wildcard /dev/nvidiactl),)
BACKEND := cuda
else
BACKEND := cpu
endif

comma := ,
BIN := .venv/bin
USER_EXTRA := $(if $(BACKEND),[$(BACKEND)])
DEV_EXTRA := [$(if $(BACKEND),$(BACKEND)$(comma))dev]
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: up test lint check bench long docs constraints clean
.DELETE_ON_ERROR:

$(BIN)/python:
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c '$(IS_NEW_ENOUGH)' \
	  || { echo "mlxpool needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) pip

# A stamp per set of packages: reinstalled when what is asked for changes.
.venv/installed-user: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e '.$(USER_EXTRA)'
	@touch $@

.venv/installed-dev: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e '.$(DEV_EXTRA)'
	@touch $@ .venv/installed-user

# The pull goes where ARGS sends the server.
up: .venv/installed-user
	@deploy/system_packages.sh serve
	@home=; before=; for word in $(ARGS); do \
	  case $$before in --home) home=$$word;; esac; \
	  case $$word in --home=*) home=$${word#--home=};; esac; before=$$word; done; \
	$(BIN)/mlxpool pull starter $${home:+--home "$$home"}
	@exec $(BIN)/mlxpool up $(ARGS)

test: .venv/installed-dev
	@deploy/system_packages.sh test
	$(PYTEST) $(ARGS)

# mypy looks for packages in folders, and mlxpool has none of its own: links give it one.
build/typing/mlxpool:
	@mkdir -p $@
	@for part in parent worker shared; do ln -sfn ../../../$$part $@/$$part; done

lint: .venv/installed-dev build/typing/mlxpool
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/typing $(BIN)/mypy -p mlxpool.parent -p mlxpool.worker -p mlxpool.shared
	$(BIN)/lint-imports

check: lint
	$(PYTEST) tests/unit $(ARGS)

bench: .venv/installed-dev
	$(BIN)/python -m tests.bench.run_all $(ARGS)

long: .venv/installed-dev
	$(BIN)/python -m pytest tests -m long --timeout 7200 $(ARGS)

docs: .venv/installed-dev
	$(BIN)/python docs/generate.py

# Pins of the other backends are their wheels' own business: they follow mlx. Which build of torch (+cpu) an
# index offers is its own business too.
constraints: .venv/installed-dev
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable \
	  | sed 's/^\(torch==[^+]*\)+.*/\1/' | grep -vi '^setuptools=='; } > build/constraints.txt
	@mv build/constraints.txt constraints.txt

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
