# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
BIN := $(VENV)/bin
# Tests use pytest-xdist over the cores this process may use; one BLAS thread each.
WORKERS ?= auto
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow check docs clean

$(VENV)/.installed: pyproject.toml tools/python312.sh
	@python=$$(sh tools/python312.sh) && "$$python" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow and not cuda" -n $(WORKERS)

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m "slow" -n $(WORKERS) --timeout 3600

docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test
	$(MAKE) docs

clean:
	rm -rf $(VENV) docs/_build demo_output build dist
