# Both commands do all their own set-up on a machine that has only Python; see bootstrap.py.
PYTHON ?= python3

.PHONY: report test setup check

report:
	$(PYTHON) bootstrap.py report $(if $(MODEL),'MODEL=$(MODEL)') $(if $(DATA),'DATA=$(DATA)') $(ARGS)

test:
	$(PYTHON) bootstrap.py test $(ARGS)

setup:
	$(PYTHON) bootstrap.py setup

check: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
