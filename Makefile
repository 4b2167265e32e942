# Everything runs in .venv, which is made when it is missing, broken or out of date.
#
#   make PYTHON=/path/to/python ...   makes it with that Python instead of the first that fits
#   make JOBS=8 test                  runs the tests in eight processes instead of two

PYTHON :=
JOBS := 2
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.complete
MAKING := $(VENV)/.incomplete
INSTALL := $(PY) -m pip install --disable-pip-version-check --no-input \
    --constraint constraints.txt --editable '.[serve,test]'

# The stamp says for which folder, and with which PYTHON, the environment was made: a copied tree
# would otherwise import from the one it was copied from. An environment without a stamp is the
# user's own: it is completed, and made anew only if its Python does not run.
STAMPED := $(shell cat $(STAMP) 2>/dev/null)
RUNS := $(shell $(PY) -c '' >/dev/null 2>&1 && test ! -e $(MAKING) && echo yes)
REMAKE := $(if $(RUNS),,yes)
ifneq ($(STAMPED),)
REMAKE += $(if $(findstring folder=$(CURDIR);,$(STAMPED)),,yes)
REMAKE += $(if $(PYTHON),$(if $(findstring python=$(PYTHON);,$(STAMPED)),,yes))
else
REMAKE += $(if $(PYTHON),yes)
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow bench clean
ifneq ($(strip $(REMAKE)),)
.PHONY: $(STAMP)
endif

help: ## says what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | \
	    while IFS='|' read -r name text; do printf '%-16s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## makes .venv with the exact versions of constraints.txt

$(STAMP): setup.py pyproject.toml constraints.txt
ifneq ($(strip $(REMAKE)),)
	@python=$$(sh .ci/find_python.sh '$(PYTHON)') && \
	    echo "setup: making $(VENV) with $$python" && \
	    "$$python" -m venv --clear --without-pip $(VENV)
endif
	@touch $(MAKING)
	@rm -f $(STAMP)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null
	@echo "setup: installing the versions of constraints.txt (a few minutes the first time)"
	@$(INSTALL) -qq || { echo "setup: failed; to see more: $(INSTALL)" >&2; exit 1; }
	@echo 'folder=$(CURDIR); python=$(PYTHON);' > $(STAMP)
	@rm -f $(MAKING)
	@echo "setup: done"

demo: $(STAMP) ## trains the tiny K3 on this Python's own source, then writes some
	$(PY) train.py --config configs/k3_tiny.py --workdir runs/demo
	$(PY) serve.py --checkpoint runs/demo --dtype float32 --batch 1 --prompt "def " --max_tokens 400 --temperature 0.7

test: $(STAMP) ## lint, layout, then all fast tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -q tests/test_layout.py
	$(PY) -m pytest -n $(JOBS) -m "not slow and not tpu" --ignore tests/test_layout.py

test-slow: $(STAMP) ## the tests that take minutes
	$(PY) -m pytest -m "slow and not tpu" --durations 10

bench: $(STAMP) ## prints the tables of benchmarks/
	$(PY) -m benchmarks.golden
	$(PY) -m benchmarks.kda_cpu

clean: ## removes .venv, runs and all that tools left behind
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
