# Two commands set everything up: `make demo` and `make test`. PYTHON=python3.12 chooses an interpreter.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt
NETWORKS := .venv-networks/bin/python -m pip install --disable-pip-version-check --progress-bar on \
	-c constraints.txt -c tests_networks/constraints.txt
RAY := .venv-ray/bin/python -m pip install --disable-pip-version-check --progress-bar on \
	-c constraints.txt -c tests_ray/constraints.txt

.PHONY: demo test test-full test-networks test-ray test-versions lint docs docs-serve dist warmup soak sanitize clean

demo: .venv/.demo
	$(BIN)/triops demo

# Kernels are compiled first, since both processes of the suite would compile each.
test: .venv/.test lint
	$(BIN)/triops warmup
	$(BIN)/pytest -n 2 --dist worksteal -m "not full"

# What the suite leaves out to stay within ten minutes: every sample of every kernel in every other dtype.
test-full: .venv/.test
	$(BIN)/pytest -n 2 --dist worksteal -m full

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Whole networks of mmdetection3d and mmdetection on triops, in an environment of their own.
test-networks: .venv-networks/.installed
	.venv-networks/bin/pytest tests_networks

# Jobs on a Ray cluster whose workers and nodes die, in an environment of their own.
test-ray: .venv-ray/.installed
	.venv-ray/bin/pytest tests_ray

# HERE=python3: with what that Python has, such as a GPU machine's torch and Triton; nothing is installed.
RUN := $(if $(HERE),PYTHONPATH=src $(HERE),$(BIN)/python)

# Random calls of everything, on the GPU too where there is one: MINUTES=120, CALLS=100000, SEED=1, PROCESSES=4.
soak: $(if $(HERE),,.venv/.test)
	$(RUN) -m triops.acceptance.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(CALLS),--calls $(CALLS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(PROCESSES),--processes $(PROCESSES)) --json triops-soak/soak.json

# The same calls under compute-sanitizer, where there is a GPU: SECONDS=600, JOBS=4.
sanitize: $(if $(HERE),,.venv/.test)
	$(RUN) -m triops.acceptance.sanitize $(if $(SECONDS),--seconds $(SECONDS)) $(if $(JOBS),--jobs $(JOBS))

# The reduced suite with other versions of Python, torch and Triton: gigabytes to download, not part of CI.
# VERSIONS="torch-2.8.0-python-3.10 torch-2.15.0-python-3.14" chooses some, VERSIONS=--keep leaves the environments.
test-versions:
	$(PYTHON) tests_versions/run.py $(VERSIONS)

# The documentation site, into site/. Strict: a link or an anchor that leads nowhere is an error.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "site/index.html"

docs-serve: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

# Wheel and source distribution into dist/, checked, and the wheel tried in an empty environment.
dist: .venv-dist/.installed
	rm -rf dist .venv-smoke
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/check-wheel-contents dist/*.whl
	.venv-dist/bin/pyroma --min 9 dist/*.tar.gz
	$(PYTHON) -m venv .venv-smoke
	.venv-smoke/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt dist/*.whl
	cd .venv-smoke && unset PYTHONPATH && bin/triops --version && bin/triops info && bin/python ../tests/smoke.py
	.venv-smoke/bin/python -m pip uninstall -q -y triops
	test -z "$$(find .venv-smoke -name '*triops*')"
	rm -rf .venv-smoke

clean:
	rm -rf .venv .venv-dist .venv-docs .venv-smoke .venv-networks .venv-ray .venv-versions site

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert (3, 10) <= sys.version_info[:2] <= (3, 14), "triops needs Python 3.10 to 3.14"'
	$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv (a few minutes the first time)"
	$(INSTALL) -e '.[cli,viz]'
	@touch $@

.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv (a few minutes the first time)"
	$(INSTALL) -e '.[test]'
	@touch $@ .venv/.demo

# mmdet3d and the kits of its data sets come without their dependencies: what of those it needs is in the extra.
# torchvision lies apart: where it does not fit this torch, other packages that import it would stop.
.venv-networks/.installed: pyproject.toml constraints.txt tests_networks/constraints.txt
	$(PYTHON) -m venv .venv-networks
	@echo "Installing into .venv-networks (a few minutes the first time)"
	$(NETWORKS) -e '.[mmdet3d]' pytest hypothesis rich
	$(NETWORKS) --no-deps mmdet3d nuscenes-devkit lyft-dataset-sdk pyquaternion trimesh
	$(NETWORKS) --no-deps --target .venv-networks/torchvision torchvision
	@touch $@

# The packages of the extra [docs], without triops and torch: docstrings are read, nothing is imported.
.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "the site needs Python 3.11 or newer"'
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check -c constraints.txt \
		mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

.venv-dist/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --disable-pip-version-check -c constraints.txt build twine check-wheel-contents pyroma
	@touch $@

.venv-ray/.installed: pyproject.toml constraints.txt tests_ray/constraints.txt
	$(PYTHON) -m venv .venv-ray
	@echo "Installing into .venv-ray (a few minutes the first time)"
	$(RAY) -e '.[ray,parquet]' pytest hypothesis
	@touch $@
