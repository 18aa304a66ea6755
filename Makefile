# Everything lives in .venv inside this folder; the system's Python is only used to make it.
#
#   make install    .venv with the package, its tests and its linters; again only when pyproject or constraints change
#   make demo       train a small model with FP4 rollouts on the CPU
#   make test       ruff, mypy, pytest
#   make lint       ruff and mypy alone
#   make docs       build the documentation into site/; make test builds it too, and throws it away
#
# Which torch build pip finds is decided by pip's own settings. For a small CPU build where the default index offers CUDA
# wheels, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# With more threads than one, models of the tests' size run about twenty times slower.
export OMP_NUM_THREADS ?= 1

.PHONY: install demo test lint docs

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; } \
		|| { echo "trace-lightning needs Python 3.11 or newer, found: $(or $(PYTHON),none). Use make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch   # first and alone: the package must find the constrained torch, not choose the newest
	$(PIP) -e '.[test,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/trace-fit fit --config configs/grpo_fp4.yaml

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n auto --maxprocesses=4 --dist=worksteal

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
