# Tasks of a checkout. They share one virtual environment, made on first use from a Python that tools/find_python.sh
# finds. Variables to set on the command line:
#   PYTHON       the Python to make the environment with (default: found)
#   VENV         where the environment is (default: .venv)
#   EXTRAS       extras of pyproject.toml to install (default: test,lint,bench,docs,wheel and, where nvidia-smi works,
#                cuda13; for demo in a new environment: examples and, likewise, cuda13)
#   CONSTRAINTS  the file of versions to install (default: constraints.txt; empty: whatever pyproject.toml allows)
#   PIP_ARGS     more arguments for pip install, such as versions: CONSTRAINTS= PIP_ARGS='jax==0.11.2'
#   PYTEST_ARGS  more arguments for pytest
#   RESULTS      folder for the outcome of test-gpu and evidence (default: benchmarks/results)
#   MINUTES      of evidence: what does not fit is left for the next run (default: 25)
#   PARTS        of test-gpu, see tools/test_gpu.sh (default: all but sharing)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo ,cuda13)
ifndef EXTRAS
EXTRAS := test,lint,bench,docs,wheel$(CUDA)
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
# A bare clone's demo does not wait for the tools of tests and checks; the other tasks bring them later.
DEMO_INSTALLED := $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(VENV)/.installed-demo)
# jax-triton makes its calls with this part of JAX's CUDA plugin, without a GPU too. The rest of the plugin, 380 MB, reports
# in every process that it finds no CUDA. Where an extra brings CUDA, the plugin is there already.
PLUGIN_ALONE = $(if $(findstring cuda,$(EXTRAS)),,$(filter test,$(subst $(comma), ,$(EXTRAS))))
comma := ,
COMPILED := CMakeLists.txt $(wildcard jax_ep/ffi/csrc/*)

.PHONY: help env lock ffi demo test test-rest test-all test-maxtext test-gpu evidence tables lint docs wheel bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name what; do \
	  printf '  make %-15s %s\n' "$$name" "$$what"; done

# Python sources are used in place. What is compiled, and the list of dependencies, make a new installation necessary.
# What is imported later is compiled then, which takes a third of the time of compiling all that is installed.
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

env: $(INSTALLED) ## make the environment and install the package into it, editable

lock: $(INSTALLED) ## write constraints.txt anew: the newest versions that pyproject.toml allows, for every Python
	"$(BIN)/python" -m pip install --disable-pip-version-check -q uv $(PIP_ARGS)
	"$(BIN)/uv" pip compile pyproject.toml --python '$(BIN)/python' --universal --python-version 3.12 --upgrade \
	  --extra cuda13 --extra test --extra lint --extra bench --extra docs --extra wheel \
	  --no-emit-package jax-ep --no-annotate --custom-compile-command 'make lock' -q -o constraints.txt

ffi: $(INSTALLED) ## compile the custom calls into the source tree, for programs that import jax_ep from there
	PATH="$(BIN):$$PATH" tools/build_ffi.sh "$(BIN)/python"

demo: $(DEMO_INSTALLED) ## train a small MoE language model, then generate from its checkpoint
	"$(BIN)/python" examples/train_moe_flax.py
	"$(BIN)/python" examples/serve_moe.py

# Neighbouring tests share what they compile, so each process begins with a part of them in order; what tests far apart
# share comes from JAX's cache.
PYTEST := JAX_COMPILATION_CACHE_DIR='$(CURDIR)/build/jax_cache' JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
  "$(BIN)/python" -m pytest -n auto --dist worksteal -q --durations=20 --durations-min=5
WHICH :=
test: ## the tests that a person waits for, on eight CPU devices, with as many processes as there are cores
test-rest: WHICH := --only-slow
test-rest: ## those that `make test` leaves out: more sizes and numbers of ranks, whole programs
test-all: WHICH := --slow
test-all: ## both
test test-rest test-all: $(INSTALLED)
	$(PYTEST) $(WHICH) --seconds build/$@_seconds.json $(PYTEST_ARGS)

# MaxText has many dependencies that nothing else needs, so its tests have an environment of their own.
WITH_MAXTEXT := $(VENV)-maxtext
$(WITH_MAXTEXT)/.installed: tests/maxtext/requirements.txt $(CONSTRAINTS)
	@$(MAKE) --no-print-directory '$(abspath $(WITH_MAXTEXT))/bin/python' VENV='$(WITH_MAXTEXT)'
	@PIP_NO_COMPILE=1 tools/with_clock.sh 'installing MaxText into $(WITH_MAXTEXT)' '$(WITH_MAXTEXT)/bin/python' \
	  -m pip install --disable-pip-version-check -qq -r $< $(CONSTRAINTS:%=-c %)
	@touch $@

test-maxtext: $(WITH_MAXTEXT)/.installed ## the integration of MaxText, against its wheel
	JAX_EP_TESTS_OF=maxtext PYTHONPATH='$(CURDIR)' '$(WITH_MAXTEXT)/bin/python' -m pytest -q -c /dev/null --rootdir . \
	  -p no:cacheprovider -W ignore --confcutdir tests/maxtext --durations=5 $(PYTEST_ARGS) tests/maxtext

test-gpu: $(INSTALLED) ## the tests, on this machine's NVIDIA GPUs; the outcome goes to RESULTS
	RESULTS='$(RESULTS)' PYTEST_ARGS='$(PYTEST_ARGS)' tools/test_gpu.sh "$(BIN)/python" $(PARTS)

evidence: $(INSTALLED) ## what this machine's NVIDIA GPUs can show in MINUTES: tests, then benchmarks, in pieces that are remembered
	RESULTS='$(RESULTS)' MINUTES='$(MINUTES)' tools/evidence.sh "$(BIN)/python"

tables: $(INSTALLED) ## the tables of docs/performance.md, from the reports in benchmarks/results
	"$(BIN)/python" benchmarks/lib/tables.py

lint: $(INSTALLED) ## formatting, lint rules and types
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/mypy"

docs: $(INSTALLED) ## the site of docs/, in build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict -q
	@echo "built build/site/index.html"

wheel: $(INSTALLED) ## a wheel in dist/ that needs no compiler, tried out in an empty environment
	tools/build_wheel.sh "$(BIN)/python"
	CONSTRAINTS='$(CONSTRAINTS)' tools/check_wheel.sh "$(BIN)/python" dist/jax_ep-*.whl

bench: $(INSTALLED) ## every benchmark, one after another, but the comparison with another checkout
	for script in $(filter-out benchmarks/compare.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; "$(BIN)/python" "$$script" || echo "exit status $$?"; done

clean: ## remove what these tasks have made, the environment included
	rm -rf '$(VENV)' '$(WITH_MAXTEXT)' build dist runs jax_ep/ffi/libjax_ep_ffi.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
