# Two commands for users (train, test), the rest for contributors. Everything lives in .venv, made once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments of the run: make train ARGS="--training.steps 50"
ARGS ?=
# Processes of `make train`: one per GPU, or two on a CPU.
NPROC ?= $(shell $(BIN)/python -c "import torch; print(torch.accelerator.device_count() or 2)")

.PHONY: setup train test test-all lint format clean

setup: $(VENV)/ready

# pip, because it takes the machine's own choice of torch build (CPU or CUDA).
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

train: setup
	$(BIN)/torchrun --standalone --nproc_per_node=$(NPROC) train.py --job.config_file debug.toml $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadgroup

test-all: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) outputs build *.egg-info
