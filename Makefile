# `make test` and `make demo` work on a fresh checkout: they create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-long test-integrations lint bench report results presets clean

demo: $(INSTALLED)
	$(BIN)/gradweave demo

test: lint
	$(BIN)/pytest

# What takes long: torch's own tests with our class, all habits of its users, ranks that die.
test-long: $(INSTALLED)
	$(BIN)/pytest -m long

# Lightning, Accelerate and Transformers with our wrapper, in an environment that has them.
INTEGRATIONS := .venv-integrations
test-integrations: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/pytest -m integrations tests/integrations

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planners.py

# report.html of the runs that `gradweave bench training` has left in runs/, or of RUNS.
RUNS ?= $(wildcard runs/*)
report: $(INSTALLED)
	$(BIN)/gradweave report $(RUNS)

# docs/results.md and its pictures: the papers' simulated results beside the papers' own figures.
results: $(INSTALLED)
	cd benchmarks && ../$(BIN)/python -m papers ../docs

# src/gradweave/presets: the shipped traces and networks.
presets: $(INSTALLED)
	$(BIN)/python benchmarks/make_presets.py

# A virtual environment of ours alone; constraints.txt pins what goes into it. Of torch 2.13.0 pip
# takes the build its configuration prefers: on a stock Linux machine that is the CUDA build, several
# gigabytes, unless it is pointed at a CPU build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt constraints-integrations.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-integrations.txt --editable '.[dev,integrations]'
	touch $@

clean:
	rm -rf $(VENV) $(INTEGRATIONS) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
