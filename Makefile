# Two commands to know: `make train` and `make test`. Each makes its own virtual environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc src -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name py.typed)

.PHONY: help train test unit lint docs test-all test-gpu bench wheel wheels clean
help:
	@echo "make train     train a small GPT, its optimizer on the host; ends with a report page"
	@echo "make test      lint, types and every test that needs no GPU (a pairwise subset of large matrices)"
	@echo "make test-all  every matrix, in parts that are resumed where they stopped"
	@echo "make test-gpu  tests that need CUDA        make bench  kernels against torch and the memory's ceiling"
	@echo "make docs      the site, into build/site: open index.html there"
	@echo "make wheel     one wheel for this platform, into dist/        make wheels  manylinux ones, with Docker"

# Installed, not editable: tests run against what a user gets.
$(VENV)/.installed: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ".[test]"
	@touch $@

train: $(VENV)/.installed
	$(BIN)/twinflow train

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp tests/native/*.cpp

# Types are checked, and the site is built, beside the tests, which leave a core idle now and then.
test: $(VENV)/.installed
	@$(MAKE) --no-print-directory -j 2 lint unit docs

# Any warning fails: links, anchors, pages that no menu has, files that would come from other hosts.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: $(VENV)/.installed
	$(BIN)/python -m pytest -n 4 --dist loadfile -m "not slow and not matrix"

test-all: lint
	$(BIN)/python tests/run_parts.py

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu tests

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/host_kernels.py --save

wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist

wheels: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cibuildwheel
	$(BIN)/cibuildwheel --platform linux --output-dir dist
	@ls dist

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
