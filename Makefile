# The two commands are `make train` and `make test`; both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Almost nothing of these folders is imported; what is imported is compiled then.
UNCOMPILED := /(tests|models|moto|_inductor|pip|setuptools|mypy|mypyc)/
# All tests of a file run in one worker, since they share fixtures. Each worker has its own four ranks.
WORKERS := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed
LINTED := src tests benchmarks examples docs/draw.py

# What the site shows, or links to.
PAGES := ':(glob)*.md' docs examples 'src/*.md' 'tests/*.md' 'benchmarks/*.md'

TORCH ?= 2.15.0  # for `make test-torch`, which makes a separate environment for each version
OTHER = .venv-torch-$(strip $(TORCH))

# Tests that need ranks, on the simulated accelerator, without those that tests/gpu/test_grid.py and test_grid.py share.
GRID_AGAIN := test_ranks_that_share_a_device test_no_option_changes_the_training
NOT_SIMULATED := happens_before plan sim support e2e  # e2e and plan do not use the tests' ranks
SIMULATED := $(GRID_AGAIN:%=--deselect tests/gpu/test_grid.py::%) \
  $(filter-out $(NOT_SIMULATED:%=tests/%/),$(filter %/,$(wildcard tests/*/)))
ORDERED := tests/happens_before  # no device: a checker of the order of streams
NCCL2 := tests/sim tests/safety/test_divergence.py tests/safety/test_waits.py tests/engine/test_contracts.py  # the process group of torch 2.15
STRICT := tests/engine/test_grid.py tests/offload/test_every_strategy.py  # freed memory is overwritten
SEEDS := 0:100 1:0 2:30 3:300 4:1000  # SIM_SEED:SIM_DELAY_US; tests/sim runs with each pair
SEED := $(shell echo $$$$)  # for all other tests; make prints it

.PHONY: train test test-torch test-all test-sim wheel lint docs format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[all]'
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib || true  # as pip does, but on all cores
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/python -m accordion train $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(WORKERS) $(ARGS)

test-torch:  # the tests of `make test` with another torch; the other constraints stay
	$(PYTHON) -m venv $(OTHER)
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(OTHER)/constraints.txt  # torch 2.11 wants an older one
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt torch==$(strip $(TORCH)) -e '.[all]'
	$(OTHER)/bin/python -m pytest -m "not slow" $(WORKERS) $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-sim: $(STAMP)  # on a simulated accelerator, which g++ builds first (tests/sim/README.md)
	$(if $(strip $(ORDERED)),$(BIN)/python -m pytest $(WORKERS) $(ARGS) $(ORDERED))
	for pair in $(SEEDS); do \
	  echo "SIM_SEED=$${pair%:*} SIM_DELAY_US=$${pair#*:}"; \
	  SIM_SEED=$${pair%:*} SIM_DELAY_US=$${pair#*:} $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) tests/sim || exit 1; \
	done
	$(if $(strip $(SIMULATED)),SIM_SEED=$(SEED) $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) $(SIMULATED))
	$(if $(strip $(NCCL2)),SIM_CCL_NAME=nccl2 $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) $(NCCL2))
	SIM_POISON=2 $(BIN)/python -m pytest --device sim $(WORKERS) $(ARGS) $(STRICT)

wheel:  # builds dist/, and tests the wheel with torch alone and with each extra, in new environments
	rm -rf dist .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	.venv-wheel/bin/python -m build --outdir dist
	.venv-wheel/bin/python tests/installed.py dist/*.whl

lint: $(STAMP)
	$(BIN)/python -m ruff check $(LINTED)
	$(BIN)/python -m ruff format --check $(LINTED)
	$(BIN)/python -m mypy

docs: $(STAMP)  # the site in build/site; a link that leads nowhere is an error
	rm -rf build/pages build/site && mkdir -p build/pages
	git ls-files -co --exclude-standard -- $(PAGES) | tar cf - -T - | tar xf - -C build/pages
	$(BIN)/zensical build --clean --strict

format: $(STAMP)
	$(BIN)/python -m ruff format $(LINTED)
	$(BIN)/python -m ruff check --fix $(LINTED)

clean:
	rm -rf $(VENV) .venv-torch-* .venv-wheel build dist .cache .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
