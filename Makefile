# `make run` and `make test` need nothing but Python 3.10 to 3.13: no compiler, CUDA toolkit, driver or GPU.
# Both make .venv on first use; pyproject.toml or constraints.txt newer than it, or other EXTRAS, mean installing again.
#
# PYTHON=...       interpreter for .venv (default: the first that fits of those below)
# TORCH_INDEX=...  URL of a package index to look in too, such as PyTorch's of CPU-only wheels
# EXTRAS=cu13,sass extras of this package for `make run`
# JOBS=...         processes that `make test` runs tests in (default: one a core)
# ARGS=...         passed on to the kernel's command line, or to pytest

VENV ?= .venv
EXTRAS ?= sass
JOBS ?= auto
CANDIDATES = python3.12 python3.11 python3.13 python3.10 python3 python
FITS = import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

PY = $(VENV)/bin/python
INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: run test gpu-test lint clean

run: $(VENV)/.installed-run-$(EXTRAS)
	$(PY) -m cute_matmul.variants.v2 $(ARGS)

test: $(VENV)/.installed-dev
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# On a Hopper GPU. Without one, every test is skipped, and says so. A kernel that hangs cannot be interrupted: the
# thread method ends the process instead.
gpu-test: $(VENV)/.installed-dev
	$(PY) -m pytest -m gpu --timeout 300 --timeout-method thread $(ARGS)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

$(VENV)/.installed-run-$(EXTRAS): pyproject.toml constraints.txt | $(PY)
	$(INSTALL) -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(PY)
	$(INSTALL) -e '.[dev]'
	@touch $@

$(PY):
	@for python in $(or $(PYTHON),$(CANDIDATES)); do \
		if $$python -c '$(FITS)' 2>/dev/null; then \
			echo "$(VENV): $$($$python --version) ($$(command -v $$python))"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "error: none of these is Python 3.10 to 3.13 with venv: $(or $(PYTHON),$(CANDIDATES))." >&2; \
	echo "Install one (on Debian and Ubuntu python3-venv too), or name one: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
