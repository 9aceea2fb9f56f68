# Two commands: `make demo` (the whole job on real input) and `make test`. Each works on a fresh clone.

PYTHON ?= python3.11
PRESET ?= smollm2
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
READY  := $(VENV)/.ready-$(LOCK)

.PHONY: setup demo test test-all lab bench lint fix strip clean

setup: $(READY)

# --no-deps: the lock is complete, and what it leaves out (torchvision, torchaudio, torchcodec) must stay out.
$(READY): requirements/$(LOCK).lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "Python 3.11 is needed, found `$(PYTHON) --version`. Next: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	@echo "installing the $(LOCK) environment into $(VENV) (some minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/$(LOCK).lock || \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --extra-index-url $(TORCH_CPU_INDEX) -r requirements/$(LOCK).lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@TQDM_DISABLE=1 $(BIN)/python -c 'from eaglebook import verifier; print("verifier:", verifier.resolve(verifier.EMBEDDED).name)'
	@touch $@

demo: $(READY)
	@$(BIN)/eaglebook run --preset $(PRESET)

test: $(READY)
	@$(BIN)/python -m pytest -m "not slow"

test-all: $(READY)
	@$(BIN)/python -m pytest

lab: $(READY)
	@$(BIN)/jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

bench: $(READY)
	@for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/nbstripout --verify --keep-id --extra-keys "metadata.papermill metadata.language_info.version cell.metadata.papermill" notebooks/*.ipynb
	@$(BIN)/mypy

fix: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(MAKE) --no-print-directory strip

strip: $(READY)
	@$(BIN)/nbstripout --keep-id --extra-keys "metadata.papermill metadata.language_info.version cell.metadata.papermill" notebooks/*.ipynb

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@echo "outputs/ is kept; delete runs there by hand"
