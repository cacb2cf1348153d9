# `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help run repro ui stop gc test test-trials test-services test-gpu services check lock clean

PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: .venv/.installed  ## run the pipeline: data to picked engines; ARGS="debug=smoke" overrides values
	@python -m flows.optimize $(ARGS)

repro: .venv/.installed  ## run the same pipeline with DVC
	dvc repro

ui: .venv/.installed  ## open the Prefect and MLflow pages on 127.0.0.1 (Ctrl-C stops MLflow)
	@python -m flows.local_server
	@if [ -n "$$MLFLOW_TRACKING_URI" ]; then echo "MLflow: $$MLFLOW_TRACKING_URI (MLFLOW_TRACKING_URI)" | sed 's|//[^/]*@|//***@|'; \
	else echo "MLflow: http://127.0.0.1:5000"; \
		export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false; \
		exec mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000; fi

stop: .venv/.installed  ## stop the local Prefect server that a run started
	@python -m flows.local_server --stop

gc: .venv/.installed  ## remove from DVC's cache what neither this checkout nor a picked engine needs
	@python -m flows.gc

# Two processes at a time; threads that wait sleep, so that two trainings at once do not take each other's CPU. Where one
# crashes, the run ends: xdist may wait for ever for the tests of a process that it has replaced.
test: .venv/.installed-dev services  ## run the tests; ARGS="-m 'not slow'" leaves out the long ones
	@OMP_WAIT_POLICY=passive python -m pytest --numprocesses 2 --max-worker-restart 0 -m 'not trial' $(ARGS)

test-trials: .venv/.installed-dev  ## run the tests that `make test` leaves out: whole benchmarks, random faults
	@python -m pytest -m trial

test-services: .venv/.installed-dev services  ## test compose.yaml and its servers, started as processes
	@python -m pytest tests/test_docker.py tests/test_services.py

services:  ## install what tests start, PostgreSQL and Chromium, with apt-get if possible
	@.ci/services

test-gpu: .venv/.installed-gpu  ## run the tests that need an NVIDIA GPU, with TensorRT
	@python -m pytest -m "gpu or tensorrt"

check: .venv/.installed-dev  ## check formatting, lint, types and import rules
	ruff format --check .
	ruff check .
	mypy
	lint-imports

lock: .venv/.installed-dev  ## write requirements.lock from the installed packages
	@(echo '# Exact versions of every package, for `pip --constraint`; written by `make lock`. CUDA packages are left to torch.'; \
		python -m pip freeze --exclude-editable | sed -e 's/+cpu$$//' \
		| grep -v -i -E '^(nvidia-(cu|nccl|nvjitlink|nvshmem|nvtx)|triton=|cuda-)') > requirements.lock

clean: stop  ## remove outputs, caches and tracking data (keeps .venv)
	rm -rf artifacts .dvc/cache .dvc/tmp .prefect mlflow.db* mlartifacts mlruns

# Install torch first and alone: if an index offers a CPU build, pip then takes it instead of the CUDA one.
# Most modules are never imported, so none is compiled before it is.
.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile "$$(grep -E '^torch==' requirements.lock)" --constraint requirements.lock
	$(BIN)/python -m pip install --quiet --no-compile --editable . --constraint requirements.lock
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]" --constraint requirements.lock
	touch $@

.venv/.installed-gpu: .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev,gpu]" --constraint requirements.lock
	touch $@
