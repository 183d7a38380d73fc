# make demo    fine-tune a small model inside a budget and compare it with plain PyTorch (ARGS="--steps 5" and such)
# make test    the test suite, in two processes (make test TORCH=2.11.0 tries another torch); ARGS="-k sizes" and such:
#              a part of it, in one
# make fast    of the suite what takes minutes (make fast TORCH=2.11.0 or TORCH=newest; what it is: tests/conftest.py)
# make fuzz    the property tests with examples that have not been tried before, every case of tests that make test
#              samples, kills at every call to a file, then 2,000 sequences of user actions against plain PyTorch; when
#              stopped these go on where they were (SEQUENCES="--sequences 50" and such)
# make standin PyTorch's CUDA build over a stand-in for the CUDA runtime (Linux on x86-64; 2 GB; ARGS="-k waits" and such)
# make lint    style and format; make types: type check of the installed package
# make docs    the documentation as HTML in docs/_build; a warning is an error
# make release wheel and sdist in dist/, each tried in an environment of its own: the solver without torch, then all of it
#
# Each makes the virtual environment that it needs, and renews it when what it is made from has changed. `make demo` and
# the others share .venv; the demo installs only what it runs, and the others add what they need.
# PYTHON=python3.12 names the interpreter that a new environment is made with.

PYTHON ?= python3
TORCH ?=
ARGS ?=
SEQUENCES ?=

VENV := .venv$(if $(TORCH),-$(TORCH))
TYPES_VENV := .venv-types
STANDIN_VENV := .venv-standin
# The stand-in follows this version's use of CUDA; of NVIDIA's packages it takes headers only.
STANDIN_TORCH := 2.11.0
STANDIN_HEADERS := 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*'
# What TORCH makes of the constraint on torch, as a command of sed.
TORCH_CONSTRAINT := $(if $(filter newest,$(TORCH)),/^torch==/d,$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/))
# The sizes below were measured with PyTorch's build for CPUs.
WITH_CUDA := (or several GB on Linux, if pip is not given the CPU index of PyTorch: its default build there is for CUDA)
PIP_INSTALL = -m pip --disable-pip-version-check install -qq

.PHONY: help demo test fast fuzz standin standin-environment lint types docs release
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/demo-installed
	@$(VENV)/bin/python -m offmate demo $(ARGS)

test: $(VENV)/installed
	@$(VENV)/bin/python -m pytest $(or $(ARGS),-n 2)

fast: $(VENV)/installed
	@$(VENV)/bin/python -m pytest --fast $(ARGS)

fuzz: $(VENV)/installed
	@$(VENV)/bin/python -m pytest --hypothesis-profile fuzz tests/solver tests/runtime/storage tests/offmate/reports/test_reports.py $(ARGS)
	@OFFMATE_TESTS_EVERY=1 $(VENV)/bin/python -m pytest -m sampled $(ARGS)
	@OFFMATE_TESTS_EVERY=1 $(VENV)/bin/python -m pytest tests/offmate/finetune/test_killed_checkpoints.py $(ARGS)
	@$(VENV)/bin/python -m tests.fuzz $(SEQUENCES)

standin: standin-environment
	@OMP_NUM_THREADS=1 $(STANDIN_VENV)/bin/python -m tests.standin $(ARGS)

standin-environment: $(STANDIN_VENV)/installed

lint: $(VENV)/installed
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --check .

docs: $(VENV)/installed
	@$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build

# torch without the libraries that it depends on, which the stand-in replaces and which take 3 GB. It comes last, or pip
# would report as errors that they are missing.
$(STANDIN_VENV)/installed: TORCH_CONSTRAINT := s/^torch==.*/torch==$(STANDIN_TORCH)/
$(STANDIN_VENV)/installed: pyproject.toml constraints.txt
	$(call make_venv,$(STANDIN_VENV))
	@$(STANDIN_VENV)/bin/python $(PIP_INSTALL) -c $(STANDIN_VENV)/constraints.txt filelock fsspec jinja2 networkx sympy \
	  typing-extensions 'setuptools<82' pulp highspy ortools rich transformers pytest pytest-timeout hypothesis xxhash
	@$(STANDIN_VENV)/bin/python $(PIP_INSTALL) -c $(STANDIN_VENV)/constraints.txt --no-deps accelerate psutil
	@$(STANDIN_VENV)/bin/python $(PIP_INSTALL) --no-deps torch==$(STANDIN_TORCH) $(STANDIN_HEADERS)
	@$(STANDIN_VENV)/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

# Type checkers cannot follow an editable install of folders that are imported under another name, so the package
# itself is installed, and checked from a folder where `offmate` is not also the source folder. build/ goes before and
# after: a module deleted here would live on in it and be installed again.
types: $(TYPES_VENV)/installed
	@rm -rf build
	@$(TYPES_VENV)/bin/python $(PIP_INSTALL) --no-deps --force-reinstall .
	@rm -rf build
	@cd $(TYPES_VENV) && bin/python -m mypy --config-file ../pyproject.toml -p offmate

# The solver needs no torch, so the wheel is tried with nothing but the solver's own libraries; the sdist with everything.
release:
	$(call make_venv,.venv-wheel)
	$(call make_venv,.venv-sdist)
	@rm -rf build dist
	@.venv-wheel/bin/python $(PIP_INSTALL) build
	@.venv-wheel/bin/python -m build --outdir dist . >/dev/null
	@rm -rf build
	@.venv-wheel/bin/python $(PIP_INSTALL) -c .venv-wheel/constraints.txt pulp highspy networkx ortools
	@.venv-wheel/bin/python $(PIP_INSTALL) --no-deps --force-reinstall dist/*.whl
	@cd .venv-wheel && bin/python ../tests/released.py solver
	@.venv-sdist/bin/python $(PIP_INSTALL) -c .venv-sdist/constraints.txt --force-reinstall dist/*.tar.gz
	@cd .venv-sdist && bin/offmate --version && bin/python ../tests/released.py training

# $(call make_venv,FOLDER,WHAT IT FETCHES): a new, empty environment, unless FOLDER is one whose interpreter still works.
# It fetches that the first time only: afterwards, what is there already stays.
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'offmate needs Python 3.11 or later; $(PYTHON) is '"$$($(PYTHON) --version 2>&1)"'.' >&2; \
	  echo 'Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@$(1)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(1) || { \
	  echo 'No virtual environment could be made; on Debian, Ubuntu and WSL2: sudo apt install python3-venv' >&2; \
	  exit 1; }
	@echo 'Setting up $(1). The first time, this downloads $(or $(2),what it needs) and takes a few minutes.'
	@sed '$(TORCH_CONSTRAINT)' constraints.txt > $(1)/constraints.txt
endef

# One environment with a stamp for each set of extras: what the demo has installed, the tests add to. The full set holds
# the demo's, so that `make demo` after `make test` installs nothing.
$(VENV)/demo-installed: pyproject.toml constraints.txt
	$(call make_venv,$(VENV),0.3 GB $(WITH_CUDA))
	@$(VENV)/bin/python $(PIP_INSTALL) -c $(VENV)/constraints.txt -e ".[hf]"
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt
	$(call make_venv,$(VENV),0.5 GB $(WITH_CUDA))
	@$(VENV)/bin/python $(PIP_INSTALL) -c $(VENV)/constraints.txt -e ".[hf,dev,docs]"
	@touch $(VENV)/demo-installed $@

$(TYPES_VENV)/installed: pyproject.toml constraints.txt
	$(call make_venv,$(TYPES_VENV))
	@$(TYPES_VENV)/bin/python $(PIP_INSTALL) -c $(TYPES_VENV)/constraints.txt ".[hf,dev]"
	@touch $@
