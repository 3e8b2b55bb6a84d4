# The two commands are `make train` and `make test`; both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Of these trees next to nothing is imported, and that is compiled when it is.
UNCOMPILED := /(tests|models|moto|plotly|_inductor|pip|setuptools|mypy|mypyc)/
# A file's tests stay with one worker: they share what was costly to make. Each worker has four ranks of its own.
WORKERS := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed
LINTED := src tests benchmarks

TORCH ?= 2.15.0  # of `make test-torch`, which has an environment of its own for each
OTHER = .venv-torch-$(strip $(TORCH))

# On the simulated accelerator: what asks for ranks there, but for what tests/gpu/test_grid.py and test_grid.py both ask.
GRID_AGAIN := test_ranks_that_share_a_device test_no_option_changes_the_training
NOT_SIMULATED := happens_before plan sim support e2e  # e2e and plan ask for no ranks of the tests
SIMULATED := $(GRID_AGAIN:%=--deselect tests/gpu/test_grid.py::%) \
  $(filter-out $(NOT_SIMULATED:%=tests/%/),$(filter %/,$(wildcard tests/*/)))
ORDERED := tests/happens_before  # on no device: a checker of what streams order
NCCL2 := tests/sim tests/safety/test_divergence.py tests/safety/test_waits.py tests/engine/test_contracts.py  # as torch 2.15 has it
STRICT := tests/engine/test_grid.py tests/offload/test_every_strategy.py  # memory is filled when it is let go
SEEDS := 0:100 1:0 2:30 3:300 4:1000  # SIM_SEED:SIM_DELAY_US, each of them with the tests of the simulator
SEED := $(shell echo $$$$)  # with all the rest; make prints it

.PHONY: train test test-torch test-all test-sim lint format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[all]'
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib || true  # as pip would, but on all cores
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/python -m accordion train $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(WORKERS) $(ARGS)

test-torch:  # what `make test` runs, on another torch; constraints hold for everything else
	$(PYTHON) -m venv $(OTHER)
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(OTHER)/constraints.txt  # torch 2.11 wants an older one
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt torch==$(strip $(TORCH)) -e '.[all]'
	$(OTHER)/bin/python -m pytest -m "not slow" $(WORKERS) $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-sim: $(STAMP)  # on a simulated accelerator, which g++ builds first: tests/sim/README.md
	$(if $(strip $(ORDERED)),$(BIN)/python -m pytest $(WORKERS) $(ARGS) $(ORDERED))
	for pair in $(SEEDS); do \
	  echo "SIM_SEED=$${pair%:*} SIM_DELAY_US=$${pair#*:}"; \
	  SIM_SEED=$${pair%:*} SIM_DELAY_US=$${pair#*:} $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) tests/sim || exit 1; \
	done
	$(if $(strip $(SIMULATED)),SIM_SEED=$(SEED) $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) $(SIMULATED))
	$(if $(strip $(NCCL2)),SIM_CCL_NAME=nccl2 $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) $(NCCL2))
	$(if $(strip $(STRICT)),SIM_POISON=2 $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) $(STRICT))

lint: $(STAMP)
	$(BIN)/python -m ruff check $(LINTED)
	$(BIN)/python -m ruff format --check $(LINTED)
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff format $(LINTED)
	$(BIN)/python -m ruff check --fix $(LINTED)

clean:
	rm -rf $(VENV) .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
