# make demo    environment + the main job: train a video transformer on a clip, in one compiled region
# make test    environment + format, lint, types, tests (what CI runs)
# make lint    its format, lint and types alone
# make venv    the environment alone
# make native  registers and spills of the native kernels, after building them (also part of make test)
#
# Where nvcc is found, every environment gets the native library; VSA_NATIVE=0 goes without.
#
# Variables: PYTHON (3.10 or later), VIDEO (a file for the demo), DEMO_ARGS, PYTEST_ARGS, PIP_ARGS (extra options of
# pip install, such as another index), CONSTRAINTS (empty: the newest versions instead of the ones CI runs), TORCH
# (another torch than CI's: `make test TORCH=2.14.1` makes an environment of its own and runs the tests there).

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
ifdef TORCH
VENV ?= .venv/torch-$(TORCH)
ifneq ($(origin CONSTRAINTS),undefined)
$(error TORCH and CONSTRAINTS exclude each other)
endif
CONSTRAINTS := $(VENV)/constraints.txt
else
VENV ?= .venv
CONSTRAINTS ?= constraints-ci.txt
endif
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(PIP_ARGS)
# What the native library is built from: new sources are installed again.
NATIVE_INPUTS := setup.py CMakeLists.txt $(shell find csrc -type f -not -name '*.md' -not -name '*.pyc')
INSTALL_INPUTS := pyproject.toml $(CONSTRAINTS) $(NATIVE_INPUTS)

.DELETE_ON_ERROR:
.PHONY: venv demo test lint native clean

venv: $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/python -m vsa_inductor demo $(if $(VIDEO),--video "$(VIDEO)") $(DEMO_ARGS)

# Types are those of CI's torch.
test: $(VENV)/.test $(if $(TORCH),,lint) native
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

native: $(VENV)/.test
	$(BIN)/python -m benchmarks.native_resources

clean:
	rm -rf "$(VENV)"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or later was found; name one with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv "$(VENV)"

ifdef TORCH
# Triton goes with torch: the one that this torch asks for, else the newest.
$(VENV)/constraints.txt: constraints-ci.txt
	@mkdir -p $(@D)
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d' $< > $@
endif

# First, so that the native library is built with its headers: a build of its own environment would fetch a torch for that.
$(VENV)/.torch: $(CONSTRAINTS) | $(BIN)/python
	@echo "installing torch into $(VENV) (a minute)"
	$(PIP_INSTALL) 'torch>=2.11'
	@touch $@

# The stamps are separate so that the demo does not wait for the test tools, and a test environment serves both.
$(VENV)/.demo: $(INSTALL_INPUTS) | $(VENV)/.torch
	@echo "installing torch, diffusers and the demo's other needs into $(VENV) (a minute or more)"
	$(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.test: $(INSTALL_INPUTS) | $(VENV)/.torch
	@echo "installing torch, diffusers and the test tools into $(VENV) (a minute or more)"
	$(PIP_INSTALL) -e '.[test]'
	@touch $@ "$(VENV)/.demo"
