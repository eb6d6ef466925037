# make demo: from a fresh clone to a trained line. make check test: what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO ?= .demo

.PHONY: help install demo check format test test-all test-gpu clean

help:
	@echo "make demo      install into $(VENV) and train the demo line in $(DEMO)"
	@echo "make test      the test suite; make test-all adds the exhaustive and long tests"
	@echo "make test-gpu  the tests that need a GPU"
	@echo "make check     format, lint, types, import rules"

install: $(STAMP)

# The wheel cache makes a second install quick; the stamp makes it unnecessary until the inputs change.
$(STAMP): pyproject.toml constraints.txt constraints-kernels.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "nstrain needs Python >= 3.10, $(PYTHON) is `$(PYTHON) --version`; set PYTHON=/path/to/python3.10+"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[run,dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps -r constraints-kernels.txt
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/nstrain demo $(DEMO)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Three processes on two cores: tests of whole lines wait for their processes much of the time.
test: $(STAMP)
	$(BIN)/pytest -m "not slow and not gpu" -n 3 --dist worksteal

test-all: $(STAMP)
	$(BIN)/pytest -m "not gpu" -n 3 --dist worksteal

# Tests of whole processes want the card to themselves: pytest's processes are others on it once they have used it.
# Where there is a card the kernels' other tests run there too, not in Triton's interpreter.
test-gpu: $(STAMP)
	$(BIN)/pytest -m "gpu and card_alone"
	$(BIN)/pytest -m "gpu and not card_alone" -n 2
	$(BIN)/pytest -m "not gpu" -n 2 tests/neuronspark/kernels

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info
