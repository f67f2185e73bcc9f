# make test   lint, types and tests          make demo   train a small MoE under a tight memory budget
# make lint   ruff and mypy alone            make venv   only set up
#
# Each target sets itself up: a virtual environment in .venv with the tested versions of constraints.txt, made once and
# brought up to date when pyproject.toml or constraints.txt change. To use an interpreter that already has everything
# (a GPU machine with its own torch, say), without any installation: make demo OOMC_NO_VENV=1 PYTHON=python3

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)

ifdef OOMC_NO_VENV
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
SETUP :=
else
PY := .venv/bin/python
SETUP := .venv/.installed
endif

PYTEST_ARGS ?=
# one process a core, each test file in one of them, since files share what they compile
PYTEST_JOBS ?= $(if $(OOMC_NO_VENV),,-n auto --dist loadfile)

.PHONY: test demo lint venv clean

test: lint
	$(PY) -m pytest $(PYTEST_JOBS) -m "not cuda and not slow" -q $(PYTEST_ARGS)

demo: $(SETUP)
	$(PY) examples/demo.py

ifdef OOMC_NO_VENV
lint:
	@echo "lint: left out, since OOMC_NO_VENV uses an interpreter as it is"
else
lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
endif

venv: $(SETUP)

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "oomc needs Python 3.11, 3.12 or 3.13 with venv: none was found" >&2; exit 1; }
	@echo "setting up .venv (once; some minutes)"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check $$(grep -E '^torch==' constraints.txt)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis
