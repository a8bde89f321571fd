# Everything sets up its own virtual environment; nothing needs to be installed by hand.
#   make demo   train a small Llama on real text with two ranks, then let it write
#   make test   the tests
#   make check  linters, types and tests; with ROOM=cost the types and tests of one package
#   make perf   the tests that measure seconds, for an idle machine
#   make faults ranks killed, stopped and cut off in every way
#   make ci     what a change must pass, in 45 minutes
#   make everything  all parts that CI takes turns with, in hours; PARTS="--only lint" chooses some
#   make fault-table  what each fault case comes to, measured, into docs/records/fault-cases.md
#   make mutants  puts faults into the code that trains; each must be caught: docs/records/mutants.md
#   make soak   an hour of proofs under each check of the heap, for crashes that are rare
#   make docs   the site, into build/site; with REPOSITORY=URL a link to the repository is in its menu
#   make gpu    checks and benchmarks on one GPU, in one minute or in ten
#   make prove  every layout of the support matrix against one device
# The index of CPU-only torch builds can be given as TORCH_INDEX=URL: on Linux, pip's default index
# serves torch with several GB of CUDA libraries.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
# A package of src/meshwright, to which `make check` and `make test` then restrict themselves.
ROOM ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)
PINNED_TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: ci everything setup docs gpu gpu-wheels demo test test-all perf faults fault-table mutants prove soak \
	check lint types bench clean

demo: $(VENV)/.base
	$(BIN)/meshwright train examples/demo.toml
	$(BIN)/meshwright generate runs/latest --prompt "def main(" --max-tokens 300

# Each worker and process would compile all files again where an environment keeps no bytecode.
test: $(VENV)/.dev
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto $(if $(ROOM),tests/$(ROOM))

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not perf"
	$(BIN)/python -m pytest -m perf

perf: $(VENV)/.dev
	$(BIN)/python -m pytest -m perf

faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m "faults and not perf"

fault-table: $(VENV)/.dev
	$(BIN)/python -m pytest -m case --junitxml build/cases.xml
	$(BIN)/python -m benchmarks.fault_cases build/cases.xml --page docs/records/fault-cases.md

prove: $(VENV)/.base
	@for world in 2 4 8 16; do $(BIN)/meshwright prove --matrix --world $$world || exit; done

mutants: $(VENV)/.dev
	PYTHONPATH=src $(BIN)/python -m benchmarks.mutants --page docs/records/mutants.md

# Both set up the environments themselves, with the system's Python.
ci:
	$(PYTHON) -m ci

everything:
	$(PYTHON) -m ci --everything $(PARTS)

setup: $(VENV)/.dev
	$(PYTHON) -m ci.debian

check: lint types test

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests benchmarks examples ci
	$(BIN)/ruff check src tests benchmarks examples ci

types: $(VENV)/.dev
	$(BIN)/mypy $(if $(ROOM),--package meshwright.$(ROOM))

soak: $(VENV)/.dev
	PYTHONPATH=src $(BIN)/python -m benchmarks.soak

docs: $(VENV)/.dev
	REPOSITORY="$(REPOSITORY)" $(BIN)/mkdocs build --quiet

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.overhead --out docs/benchmarks/overhead.json
	$(BIN)/meshwright bench peers examples/peers.toml --systems meshwright native \
		--out docs/benchmarks/modes-native.json
	$(BIN)/meshwright bench layouts examples/peers.toml --layout "dp2 mb4" "tp2 mb4" --shares
	$(BIN)/python -m benchmarks.attention --out docs/benchmarks/attention.json
	$(BIN)/python -m benchmarks.data --out docs/benchmarks/data.json
	$(BIN)/python -m benchmarks.memory --ranks 1 2 4 --out docs/benchmarks/memory.json
	$(BIN)/python -m benchmarks.scale --out docs/benchmarks/scale.json

# On a machine with a GPU and a PyTorch of its own, which is used as it is. Where that machine reaches no
# index, `make gpu-wheels GPU_PYTHON=3.12` beforehand on one that does, and build/gpu goes along.
GPU_PYTHON ?= 3.12
# Where `make gpu` leaves gpu.jsonl, gpu.md and the GPU's calibrations, and where a second call goes on; more
# arguments of it, such as "--minutes 1", "--only checks" or "--plan".
GPU_OUT ?= docs/benchmarks
GPU_ARGS ?=
GPU_WHEELS := annotated-types markdown-it-py mdurl pydantic pygments pyyaml rich safetensors \
	tokenizers torchao typing-extensions typing-inspection

gpu:
	PYTHONPATH=src:build/gpu:$$PYTHONPATH $(PYTHON) -m benchmarks.gpu --out $(GPU_OUT) $(GPU_ARGS)

gpu-wheels:
	$(PYTHON) -m pip install --quiet --target build/gpu --upgrade --no-deps --only-binary :all: \
		--platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --python-version $(GPU_PYTHON) $(GPU_WHEELS) \
		"pydantic-core==$$($(BIN)/python -c 'import pydantic_core; print(pydantic_core.__version__)')" \
		--constraint constraints.txt

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	@echo "setting up $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(INDEX) "$(PINNED_TORCH)"
	$(PIP) --constraint constraints.txt --editable ".[train]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
