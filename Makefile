# Everything runs in .venv, which `setup` makes and keeps up to date.
PYTHON := .venv/bin/python

.PHONY: ab test lint setup

ab: setup ## train a small model as TP+SP and as TSP on this machine, and compare
	$(PYTHON) -m megatron_tsp.cli ab configs/tiny_cpu/ab.yaml

test: setup ## all tests
	$(PYTHON) -m pytest -n 2

lint: setup
	$(PYTHON) -m ruff check .

setup:
	@bash scripts/setup.sh
