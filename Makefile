# The two commands are `make train` and `make test`; both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Of these trees next to nothing is imported, and that is compiled when it is.
UNCOMPILED := /(tests|models|moto|plotly|_inductor|pip|setuptools|mypy|mypyc)/
# A file's tests stay with one worker: they share what was costly to make. Each worker has four ranks of its own.
WORKERS := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed

# What has been made to run on any device; the rest of tests/world makes its tensors on the CPU or asks for what lies there.
WORLD := grid programs kinds calls steps streams precision activations some_ranks resume checkpoint checkpoint_exact \
  checkpoint_uses offload offload_step offload_places offload_uses offload_disk compat_deepspeed compat_fsdp1 \
  compat_fsdp1_state compat_fsdp2 compat_fsdp2_modules compat_fsdp2_parallel
STRICT := tests/world/test_grid.py tests/world/test_offload.py  # memory is filled when it is let go
SIMULATED := tests/sim tests/gpu $(WORLD:%=tests/world/test_%.py)

.PHONY: train test test-all test-sim lint format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[all]'
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib || true  # as pip would, but on all cores
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/python -m accordion train $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(WORKERS) $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-sim: $(STAMP)  # on a simulated accelerator, which g++ builds first: tests/sim/README.md
	$(BIN)/python -m pytest $(WORKERS) $(ARGS) tests/happens_before
	$(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) $(SIMULATED)
	SIM_POISON=2 $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) $(STRICT)

lint: $(STAMP)
	$(BIN)/python -m ruff check src tests
	$(BIN)/python -m ruff format --check src tests
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff format src tests
	$(BIN)/python -m ruff check --fix src tests

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
