# Two commands for a fresh machine with Python 3.11 and pip:
#   make demo    set up and run the main job on CPU: 200 GRPO steps on the shipped tiny MiniMax-M3
#   make test    set up and run the tests
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.samebits-ready

.PHONY: demo test setup clean

demo: $(READY)
	$(BIN)/samebits train recipes/tiny_m3_grpo.yaml device=cpu

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
# Two processes, one thread each: most of the time goes into starting engines, which uses one core. A file's tests stay together, since
# they share what they start.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests

setup: $(READY)

$(READY): pyproject.toml Makefile tests/peers.txt tools/heal_torchvision.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,dev]'
	$(BIN)/python tools/heal_torchvision.py
# In a folder of their own: where torchao is importable, transformers and peft load it into every process.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/peers -r tests/peers.txt
	touch $(READY)

clean:
	rm -rf $(VENV) runs
