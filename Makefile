# make train: the whole journey on text every Python carries.   make test: every test, offline.
# Both set up .venv in this folder first, and again whenever a requirements file changes. No other step is needed.

SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(SUITABLE)' 2> /dev/null && echo $$python && break; done)
RUN := .venv/bin/python
WORKERS ?= 2

export MPLCONFIGDIR := $(CURDIR)/.venv/matplotlib

.PHONY: help train test
help:
	@echo "make train   prepare text, train a small GPT-2 with the cosine head and its cross-entropy baseline, compare, sample"
	@echo "make test    run the test suite"

train: .venv/ready
	$(RUN) -m data.prepare pydocs --tokenizer bytes --out data/pydocs
	$(call run,quickstart)
	$(call run,quickstart_linear)
	$(RUN) -m eval.evaluate out/quickstart
	$(RUN) -m eval.evaluate out/quickstart_linear
	$(RUN) -m eval.compare out/quickstart out/quickstart_linear --baseline out/quickstart_linear --out out/comparison
	$(RUN) sample.py out/quickstart --prompt "The function returns" --temperature 0.7
	@echo "The comparison, with its figures, is in out/comparison/report.md; each run is in its own folder under out/."

# A run that exists goes on where it stopped; a finished one says so.
define run
$(RUN) train.py config/$(1).toml $(if $(wildcard out/$(1)),--resume)
endef

test: .venv/ready-dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(WORKERS) --dist loadscope

.venv/ready: requirements.txt
	$(call install,$<)
.venv/ready-dev: requirements-dev.txt requirements.txt
	$(call install,$<)
	@touch .venv/ready

define install
@test -n "$(PYTHON)" || { echo "error: needs Python 3.11, 3.12 or 3.13 with its venv module (on Debian: apt install python3-venv)" >&2; exit 2; }
@$(RUN) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
@echo "Installing $(1) into .venv: once, and a few minutes the first time"
$(RUN) -m pip install --quiet --disable-pip-version-check --requirement $(1)
@touch $@
endef
