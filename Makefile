# Two commands set everything up: `make demo` and `make test`. PYTHON=python3.12 chooses an interpreter.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt

.PHONY: demo test lint warmup clean

demo: .venv/.demo
	$(BIN)/triops demo

test: .venv/.test lint
	$(BIN)/pytest -n 2 --dist worksteal

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert (3, 10) <= sys.version_info[:2] <= (3, 13), "triops needs Python 3.10 to 3.13"'
	$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv (a few minutes the first time)"
	$(INSTALL) -e '.[cli,viz]'
	@touch $@

.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv (a few minutes the first time)"
	$(INSTALL) -e '.[test]'
	@touch $@ .venv/.demo
