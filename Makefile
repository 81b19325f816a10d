# Everything runs in .venv, which any target sets up by itself. Nothing but Python >= 3.11, pip and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the demos and studies need, and what the tests need besides.
RUN_EXTRAS := evidence,plots,search,runs,serve,watch
EXTRAS := $(RUN_EXTRAS),dev,onnx,gym,bench,metrics,docs,lightning,hf,sklearn,ray
PIP_INSTALL = PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable
# Host work uses one thread: float sums change with the thread count, and small tensors gain nothing from more.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help setup run grow evidence test test-slow test-gpu replay check format lint type imports spell pretrained sandbox bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# One pass of pip, for either set: the larger one after the smaller would cost half a minute more.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Esper needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) '.[$(1)]'
	@$(BIN)/python -c 'from esper.tolaria.executor.available import warm_up, why_not_native; why_not_native() or warm_up(print)'
	@touch $(VENV)/.runs $@
endef

$(VENV)/.runs: pyproject.toml constraints.txt
	$(call install,$(RUN_EXTRAS))

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call install,$(EXTRAS))

setup: $(VENV)/.ready  ## create .venv with everything for development
	@if [ -d .git ]; then $(BIN)/pre-commit install >/dev/null; fi

run: $(VENV)/.runs  ## train a controller on the bundled digits, then judge it against fixed ones (a few minutes)
	$(BIN)/esper study demo

grow: $(VENV)/.runs  ## grow one network on the bundled digits and show what grew
	$(BIN)/esper grow --task digits_blind


test: $(VENV)/.ready  ## run the test suite
	$(BIN)/python -m pytest -n auto --dist worksteal

evidence: frontier-digits rivals-digits frontier-fashion frontier-pydoc table-digits-blind table-digits-saturated  ## every published table; hours, goes on where it stopped

# One command per published table, from the code alone. QUICK=1 goes the whole way with one policy and five pairs.
table-digits-%: $(VENV)/.ready
	$(BIN)/esper study digits_$* $(if $(QUICK),--quick)

frontier-% rivals-%: $(VENV)/.ready
	$(BIN)/esper study $@ $(if $(QUICK),--quick)

# From the code alone, with the one thread it was trained with: other numbers give other bits. Half an hour. Nothing is written unless the policy is at least as good as the best rule.
pretrained: $(VENV)/.runs  ## train the policy that comes with Esper, choose its checkpoint, write weights and card
	OMP_NUM_THREADS=1 $(BIN)/esper train ppo --preset nursery --seed 1 --worker-kind inline --run-id pretrained
	$(BIN)/python tools/build_pretrained.py runs/pretrained --held-out docs/evidence_data/nursery/universal.csv

sandbox: $(VENV)/.runs  ## train the agent in small worlds whose best policy is known
	$(BIN)/esper sandbox

test-slow: $(VENV)/.ready  ## run the long evidence and stress tests
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

replay: $(VENV)/.ready  ## compare a seeded run, bit by bit and event by event, with the stored one
	$(BIN)/python tools/replay.py $(if $(UPDATE),--update)

test-gpu: $(VENV)/.ready  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

bench: $(VENV)/.ready  ## measure speed beside plain PyTorch; figures also as JSON in runs/
	@mkdir -p runs
	$(BIN)/esper bench engine --task digits_mlp --out runs/bench-engine-mlp.json
	$(BIN)/esper bench engine --task digits_conv --out runs/bench-engine-cnn.json
	$(BIN)/esper bench coalitions --out runs/bench-coalitions.json
	$(BIN)/esper bench grow --out runs/bench-grow.json
	$(BIN)/esper bench rounds --out runs/bench-rounds.json
	$(BIN)/esper bench ppo --out runs/bench-ppo.json
	$(BIN)/esper bench telemetry --out runs/bench-telemetry.json

docs: $(VENV)/.ready  ## build the documentation into site/; a broken link is an error
	$(BIN)/zensical build --strict

check: lint type imports spell  ## formatting, lint, types, import contracts, spelling

format: $(VENV)/.ready  ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: $(VENV)/.ready
	$(BIN)/mypy

imports: $(VENV)/.ready
	$(BIN)/lint-imports

spell: $(VENV)/.ready
	$(BIN)/codespell

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
