# Everything happens in .venv. `make demo` and `make test` are all the set-up there is.
PYTHON ?= python3
TORCH ?= 2.13.0
TRITON ?= 3.7.1
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
MODEL ?= smollm2-135m
PROMPT ?= Explain in two sentences why the sky is blue.

.NOTPARALLEL:
.PHONY: demo test test-slow test-matrix clients census lint bench fidelity kernels clean

demo: .venv/.installed
	$(BIN)/lean run $(MODEL) "$(PROMPT)"

test: .venv/.installed-dev
	$(BIN)/python -P -m pytest -n auto --maxprocesses 8 --dist loadfile

test-slow: .venv/.installed-dev
	$(BIN)/python -P -m pytest -m slow -n auto --maxprocesses 2 --dist loadfile

# PYTHONS="PATH ..." names interpreters, MATRIX="--only 'Python 3.12' tests/cli" rows and arguments of pytest.
test-matrix:
	$(PYTHON) -P tests/support/matrix.py $(MATRIX)

# Clients of the server that nobody here wrote. Their tests run where LEAN_CLIENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python.
clients: .venv-clients/.installed

# CENSUS="--types falcon gpt_neo" runs some types, CENSUS=--write writes docs/models.md.
census: .venv/.installed-dev
	$(BIN)/python -P tests/whole/census.py $(CENSUS)

lint: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/.installed
	$(BIN)/lean bench decode $(MODEL)

fidelity: .venv/.installed-dev
	$(BIN)/lean sweep $(MODEL) --dtype float32 --bos none --formats int8,fp8,k8v4,k6v4,int4,pc4v3 --out build/fidelity

KERNELS := $(BIN)/python -P -m lean.kernels.report --jobs 2 --head-dim 64 128 256
NVIDIA := sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120

kernels: .venv/.installed-dev
	$(KERNELS) --target $(NVIDIA) gfx90a gfx942 gfx1100 --kernel decode prefill kv_write

clean:
	rm -rf .venv .venv-clients build dist *.egg-info

# A torch that $(PYTHON) has already serves; otherwise the tested release is installed: on a machine with an NVIDIA
# driver the default (CUDA) build, which === asks for, elsewhere a CPU build where pip is pointed at one.
HAS_TORCH := import torch; raise SystemExit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))

.venv/.torch:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit("lean needs Python 3.11 or newer, $(PYTHON) is " + v if sys.version_info < (3, 11) else 0)'
	@set -e; $(PYTHON) -m venv --clear --system-site-packages .venv; \
	if $(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null; then echo "using the torch of $(PYTHON)"; else \
	  echo "installing torch $(TORCH) into .venv (this can take minutes)"; $(PYTHON) -m venv --clear .venv; \
	  if command -v nvidia-smi >/dev/null 2>&1; then $(PIP) "torch===$(TORCH)"; else $(PIP) "torch==$(TORCH)"; fi; fi
	@touch $@

# Installing compiles the C++ kernels.
SOURCES := pyproject.toml setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h kernels/cpu/build.py)

.venv/.installed: .venv/.torch $(SOURCES)
	@echo "installing lean"
	@$(PIP) -e .
	@touch $@

# Builds of torch for CPUs bring no Triton: the tests then get the release that the default build of TORCH pins.
HAS_TRITON := import sys, importlib.util as u; raise SystemExit(sys.platform == "linux" and not u.find_spec("triton"))

.venv/.installed-dev: .venv/.torch $(SOURCES)
	@echo "installing lean and its development tools"
	@$(BIN)/python -P -c '$(HAS_TRITON)' || $(PIP) "triton==$(TRITON)"
	@$(PIP) -e ".[dev]"
	@touch $@ .venv/.installed

# They are installed without lean and torch, by the pip of .venv. Without a network this ends soon, with an error.
CLIENTS = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["serve-test"])

.venv-clients/.installed: pyproject.toml | .venv/.torch
	@echo "installing clients of the server into .venv-clients"
	@$(PYTHON) -m venv --clear --without-pip .venv-clients
	@$(BIN)/python -m pip --python .venv-clients/bin/python --disable-pip-version-check --retries 1 --timeout 10 \
	  install --quiet --no-compile $$($(PYTHON) -c '$(CLIENTS)')
	@touch $@
