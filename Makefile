# `make test` and `make demo` work on a fresh checkout: they create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
IMPORTED := $(VENV)/.imported
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# Where it is set, every rank of every test would compile all of our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long test-faults soak test-integrations test-accelerator test-torch test-pure package docs lint bench report results presets clean

demo: $(INSTALLED)
	$(BIN)/gradweave demo

# Both at once: types are checked on one core while the other compiles what tests import.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs 2 lint suite

.PHONY: suite
suite: $(IMPORTED)
	$(BIN)/pytest

# All who run tests import the same at once: on a fresh checkout each would compile all of it. If
# something can't be imported, the suite will say so.
$(IMPORTED): $(INSTALLED)
	-PYTHONPATH=tests $(BIN)/pytest -p preloaded --collect-only -n 0 -qq > /dev/null
	touch $@

# What takes long: torch's own tests with our class, all habits of its users, ranks that die; and laws
# on many more examples.
test-long: $(IMPORTED)
	$(BIN)/pytest -m "long or hypothesis" --hypothesis-profile=long

# On a simulated accelerator, which is built first if it has to be; that takes a minute or two.
.PHONY: accelerator
accelerator: $(INSTALLED)
	$(BIN)/python tests/accelerator/building.py

test-accelerator: accelerator
	$(BIN)/pytest -m accelerator tests/accelerator

# Faults on the lab: each with each wrapper, in one stage. `make test-faults FAULTS="--all --keep"` runs
# all stages and writes the table of docs/reliability.md.
test-faults: $(INSTALLED)
	$(BIN)/python tests/faults/matrix.py $(FAULTS)

# Training while links and ranks change, compared with torch's: `make soak MINUTES=5`, or an hour.
MINUTES ?= 60
soak: $(INSTALLED)
	mkdir -p build
	$(BIN)/python benchmarks/soak.py build/soak --minutes $(MINUTES)

# The tests that depend on torch, with another version of it, in an environment of its own:
# `make test-torch VERSION=2.14.1`. Everything else is pinned as ever (docs/torch-versions.md), but for
# setuptools, of which older versions of torch want older ones.
VERSION ?= 2.13.0
TORCH_VENV := .venv-torch-$(VERSION)
test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/pytest tests/runtime tests/checkpoint tests/sparse tests/comm tests/test_architecture.py

$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	sed -e 's/^torch==.*/torch==$(VERSION)/' -e '/^setuptools==/d' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip install --quiet --disable-pip-version-check \
		--constraint $(TORCH_VENV)/constraints.txt --editable '.[dev]'
	touch $@

# The tests that need no torch, with another Python: `make test-pure PYTHON=python3.13`.
PURE_VENV := .venv-pure-$(notdir $(PYTHON))
test-pure: $(PURE_VENV)/.installed
	$(PURE_VENV)/bin/pytest tests/unit tests/session tests/lab \
		--ignore tests/unit/test_costs.py --ignore tests/session/test_compression_worth.py

$(PURE_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PURE_VENV)
	$(PURE_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(PURE_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		hypothesis msgspec numpy pyroute2 pytest pytest-xdist rich
	touch $@

# Source distribution and wheel in DIST, the wheel made from the source distribution, and both checked.
DIST ?= dist
PACKAGE_VENV := .venv-package
package: $(PACKAGE_VENV)/.installed
	rm -f $(DIST)/gradweave-*.whl $(DIST)/gradweave-*.tar.gz
	$(PACKAGE_VENV)/bin/python -m build --no-isolation --outdir $(DIST)
	$(PACKAGE_VENV)/bin/twine check --strict $(DIST)/gradweave-*

$(PACKAGE_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build setuptools twine
	touch $@

# What is installed to develop this, with versions, licences and who needs what: a bill of materials,
# as CycloneDX in DIST. And whether anything bad is known of what is pinned, which needs the internet.
.PHONY: bill audit
BILL_VENV := .venv-bill
bill: $(INSTALLED) $(BILL_VENV)/.installed
	mkdir -p $(DIST)
	$(BILL_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
		--output-reproducible --output-file $(DIST)/gradweave.cdx.json $(BIN)/python

audit: $(BILL_VENV)/.installed
	$(BILL_VENV)/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

$(BILL_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BILL_VENV)
	$(BILL_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt cyclonedx-bom pip-audit
	touch $@

# The pages of docs/ as a site in build/site, with a reference made from docstrings; warnings are
# errors. It needs no torch: docstrings are read, not imported.
DOCS_VENV := .venv-docs
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

$(DOCS_VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt mkdocs-material 'mkdocstrings[python]'
	touch $@

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

# src/gradweave/_src/presets: the shipped traces and networks.
presets: $(INSTALLED)
	$(BIN)/python benchmarks/make_presets.py

# A virtual environment of ours alone; constraints.txt pins what goes into it. Of torch 2.13.0 pip
# takes the build its configuration prefers: on a stock Linux machine that is the CUDA build, several
# gigabytes, unless it is pointed at a CPU build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# First a newer pip, which takes less time. What is imported will be compiled, and no more:
	@# torch while the rest is installed.
	$(BIN)/pip install $(PIP_OPTIONS) pip
	$(BIN)/pip install $(PIP_OPTIONS) numpy torch
	$(BIN)/python -c "import torch._dynamo" & $(BIN)/pip install $(PIP_OPTIONS) --editable '.[dev]' && wait
	touch $@

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt constraints-integrations.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-integrations.txt --editable '.[dev,integrations]'
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .venv-pure-* $(PACKAGE_VENV) $(DOCS_VENV) $(BILL_VENV) $(INTEGRATIONS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
