# Development tasks. They share one virtual environment, created on first use from the Python that tools/find_python.sh
# finds. Variables to set on the command line:
#   PYTHON       the Python that creates the environment (default: searched)
#   VENV         folder of the environment (default: .venv)
#   EXTRAS       extras of pyproject.toml to install (default: test,lint,docs,wheel, and cuda13 if nvidia-smi works; for
#                demo in a new environment: examples, and cuda13 if nvidia-smi works)
#   CONSTRAINTS  file of versions to install (default: constraints.txt; empty: any that pyproject.toml allows)
#   PIP_ARGS     more arguments for pip install, for example versions: CONSTRAINTS= PIP_ARGS='jax==0.11.2'
#   PYTEST_ARGS  more arguments for pytest
#   RESULTS      folder for the results of test-gpu and evidence (default: benchmarks/results)
#   MINUTES      time limit of evidence; the rest is left for the next run (default: 25)
#   PARTS        parts of test-gpu, see tools/test_gpu.sh (default: all except sharing and gemms)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo ,cuda13)
ifndef EXTRAS
EXTRAS := test,lint,docs,wheel$(CUDA)
DEMO_EXTRAS := examples$(CUDA)
endif
DEMO_EXTRAS ?= $(EXTRAS)
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
PYTEST_ARGS ?=
RESULTS ?= benchmarks/results
PARTS ?=
MINUTES ?= 25

BIN := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/.installed
# In a fresh clone, the demo does not install the tools for tests and checks; the other tasks install them later.
DEMO_INSTALLED := $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(VENV)/.installed-demo)
# jax-triton needs this part of JAX's CUDA plugin, also without a GPU. The rest of the plugin, 380 MB, reports missing CUDA
# in every process. If an extra installs CUDA, the plugin is already there.
PLUGIN_ALONE = $(if $(findstring cuda,$(EXTRAS)),,$(filter test,$(subst $(comma), ,$(EXTRAS))))
comma := ,
COMPILED := CMakeLists.txt $(wildcard jax_ep/ffi/csrc/*)

.PHONY: help env lock ffi demo test test-rest test-all test-maxtext test-gpu evidence tables lint docs wheel wheel-aarch64 bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name what; do \
	  printf '  make %-15s %s\n' "$$name" "$$what"; done

# Python sources are used in place. Changes of compiled sources or of dependencies need a new installation. Bytecode is
# compiled at import, which takes a third of the time of compiling all installed packages.
$(VENV)/.installed-demo: EXTRAS := $(DEMO_EXTRAS)
$(INSTALLED) $(VENV)/.installed-demo: pyproject.toml $(CONSTRAINTS) $(COMPILED) | $(BIN)/python
	@PIP_NO_COMPILE=1 tools/with_clock.sh 'installing jax_ep[$(EXTRAS)] into $(VENV)' \
	  "$(BIN)/python" -m pip install --disable-pip-version-check -qq -e '.[$(EXTRAS)]' $(CONSTRAINTS:%=-c %) $(PIP_ARGS)
	$(if $(PLUGIN_ALONE),@"$(BIN)/python" -m pip install --disable-pip-version-check -qq --no-deps \
	  "jax-cuda13-plugin==$$("$(BIN)/python" -c 'import jaxlib; print(jaxlib.__version__)')")
	@touch $@

$(BIN)/python:
	@python=$$(PYTHON='$(PYTHON)' tools/find_python.sh) && \
	  tools/with_clock.sh "making $(VENV) with $$python" "$$python" -m venv '$(VENV)'

env: $(INSTALLED) ## create the environment and install the package, editable

lock: $(INSTALLED) ## update constraints.txt to the newest versions that pyproject.toml allows, for every Python
	"$(BIN)/python" -m pip install --disable-pip-version-check -q uv $(PIP_ARGS)
	"$(BIN)/uv" pip compile pyproject.toml --python '$(BIN)/python' --universal --python-version 3.12 --upgrade \
	  --extra cuda13 --extra test --extra lint --extra docs --extra wheel \
	  --no-emit-package jax-ep --no-annotate --custom-compile-command 'make lock' -q -o constraints.txt

ffi: $(INSTALLED) ## compile the FFI library into the source tree
	PATH="$(BIN):$$PATH" tools/build_ffi.sh "$(BIN)/python"

demo: $(DEMO_INSTALLED) ## train a small MoE language model, then generate from its checkpoint
	"$(BIN)/python" examples/train_moe_flax.py
	"$(BIN)/python" examples/serve_moe.py

# Adjacent tests share compiled programs, so each process starts with a contiguous part; JAX's cache covers distant tests.
PYTEST := JAX_COMPILATION_CACHE_DIR='$(CURDIR)/build/jax_cache' JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
  "$(BIN)/python" -m pytest -n auto --dist worksteal -q --durations=20 --durations-min=5
WHICH :=
test: ## run the fast tests on eight CPU devices, with one process per core
test-rest: WHICH := --only-slow
test-rest: ## run the remaining tests: more sizes and numbers of ranks, whole programs
test-all: WHICH := --slow
test-all: ## run both
# After a space pytest would take the file, once it exists, for tests, and not know the option.
test-rest test-all: $(BIN)/python-zig
test test-rest test-all: $(INSTALLED)
	$(PYTEST) $(WHICH) --seconds=build/$@_seconds.json $(PYTEST_ARGS)

# MaxText has many dependencies that nothing else needs, so its tests have a separate environment.
WITH_MAXTEXT := $(VENV)-maxtext
$(WITH_MAXTEXT)/.installed: tests/maxtext/requirements.txt $(CONSTRAINTS)
	@$(MAKE) --no-print-directory '$(abspath $(WITH_MAXTEXT))/bin/python' VENV='$(WITH_MAXTEXT)'
	@PIP_NO_COMPILE=1 tools/with_clock.sh 'installing MaxText into $(WITH_MAXTEXT)' '$(WITH_MAXTEXT)/bin/python' \
	  -m pip install --disable-pip-version-check -qq -r $< $(CONSTRAINTS:%=-c %)
	@touch $@

test-maxtext: $(WITH_MAXTEXT)/.installed ## test the MaxText integration against its wheel
	JAX_EP_TESTS_OF=maxtext PYTHONPATH='$(CURDIR)' '$(WITH_MAXTEXT)/bin/python' -m pytest -n auto --dist worksteal -q \
	  -c /dev/null --rootdir . -p no:cacheprovider -W ignore --confcutdir tests/maxtext --durations=5 $(PYTEST_ARGS) \
	  tests/maxtext

test-gpu: $(INSTALLED) ## run the tests on this machine's NVIDIA GPUs; results go to RESULTS
	RESULTS='$(RESULTS)' PYTEST_ARGS='$(PYTEST_ARGS)' tools/test_gpu.sh "$(BIN)/python" $(PARTS)

evidence: $(INSTALLED) ## run tests, then benchmarks, on this machine's NVIDIA GPUs for MINUTES; resumes finished pieces
	RESULTS='$(RESULTS)' MINUTES='$(MINUTES)' tools/evidence.sh "$(BIN)/python"

tables: $(INSTALLED) ## regenerate the tables of docs/performance.md from the reports in benchmarks/results
	"$(BIN)/python" benchmarks/tables.py

lint: $(INSTALLED) ## check formatting, lint rules and types
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/mypy"

docs: $(INSTALLED) ## build the site of docs/ in build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict -q
	@echo "built build/site/index.html"

wheel: $(INSTALLED) ## build a wheel in dist/, and test it in an empty environment without a compiler
	tools/build_wheel.sh "$(BIN)/python"
	CONSTRAINTS='$(CONSTRAINTS)' tools/check_wheel.sh "$(BIN)/python" dist/jax_ep-*.whl

$(BIN)/python-zig: | $(INSTALLED)
	"$(BIN)/python" -m pip install --disable-pip-version-check -q 'ziglang>=0.17,<0.18'

wheel-aarch64: $(BIN)/python-zig ## build a wheel for aarch64 (Grace Hopper) in dist/, in place of the other
	tools/build_wheel.sh "$(BIN)/python" -C cmake.define.CMAKE_TOOLCHAIN_FILE='$(CURDIR)/tools/aarch64.cmake' \
	  -C env._PYTHON_HOST_PLATFORM=linux-aarch64

bench: $(INSTALLED) ## run every benchmark except the comparison with another checkout
	for script in $(filter-out benchmarks/compare.py benchmarks/public_operations.py benchmarks/scale_model.py benchmarks/tables.py benchmarks/plots.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; "$(BIN)/python" "$$script" || echo "exit status $$?"; done

clean: ## remove all results of these tasks, including the environment
	rm -rf '$(VENV)' '$(WITH_MAXTEXT)' build dist runs jax_ep/ffi/libjax_ep_ffi.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
