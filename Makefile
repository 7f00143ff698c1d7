# The front door. On a fresh Debian or Ubuntu with git, make and python3 every target fetches what it misses first.
#   TORCH=system   use the torch (>= 2.10) that PYTHON has, instead of the pinned one from PyPI
#   OFFLINE=1      fetch nothing; stop with a message when something is missing
#   SUDO=1         install missing Debian packages with sudo where that asks nothing; else the line to run is printed
#   PYTHON=...     the interpreter .venv is made from        VENV=...   where the environment is
#   JOBS=...       compile jobs (default: one per CPU and 2 GB of free memory)
#   CUDA=1|0|auto  with the CUDA backend or without; auto (default): with it where nvcc and a GPU are. CUDA=1 without
#                  nvcc takes PyPI's into .venv; CUDAARCHS=native compiles for the GPU of this machine alone
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build configure program package test bench demo mutation adversarial vllm-test wheel docs bundle format lint clean distclean

ifneq ($(words $(CURDIR)),1)
$(error The path of this checkout has a space in it, which make cannot handle: $(CURDIR))
endif

PYTHON ?= python3
VENV ?= .venv
TORCH ?= pypi
OFFLINE ?= 0
SUDO ?= 0
CUDA ?= auto
JOBS = $(shell awk '/MemAvailable/ {m = int($$2 / 2e6)} END {"nproc" | getline n; print (m < 1 ? 1 : m < n ? m : n)}' /proc/meminfo)

BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready-$(TORCH)
export PATH := $(BIN):$(if $(filter system,$(TORCH)),$(dir $(shell which $(PYTHON))):)$(PATH)
# For ccache: one name of the compiler everywhere, and paths that are relative to the build folder, which lies one level
# below the sources everywhere. So a build takes the objects of those before it that compiled the same.
export CXX
export CCACHE_BASEDIR := $(CURDIR)

# Headers and libraries of `make bundle`, for CMake.
export CMAKE_PREFIX_PATH := $(subst $() ,:,$(strip $(abspath $(wildcard bundle/usr)) $(CMAKE_PREFIX_PATH)))

# NSA_CUDA is what pyproject.toml looks at.
export CUDACXX := $(firstword $(CUDACXX) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
export NSA_CUDA := $(if $(filter auto,$(CUDA)),$(if $(and $(CUDACXX),$(wildcard /dev/nvidiactl)),1,0),$(CUDA))
CUDA_CHOICE := build/.cuda-$(NSA_CUDA)
ifeq ($(NSA_CUDA)$(CUDACXX),1)
CUDACXX := $(abspath $(VENV))/cuda/bin/nvcc
CUDA_READY := $(VENV)/.ready-cuda
endif

help:
	@echo 'make build      prepare .venv, compile libnsa, the program nsa (build/bin/nsa) and the Python package'
	@echo 'make demo       train NSA beside full attention on Python sources, report with pictures in demo/'
	@echo 'make test       all tests: C++, Python, command line'
	@echo 'make bench      every operation and the whole against dense attention; table and JSON'
	@echo 'make wheel      the Python package as a wheel (manylinux) and as sources (sdist) in dist/'
	@echo 'make docs       the pages of docs/ and of the Python API as a site in build/docs/'
	@echo 'make bundle     headers, test libraries and transformers for a machine without network, in bundle/'
	@echo 'make format     clang-format and ruff over the tree        make lint   the same as a check, and clang-tidy'
	@echo 'make mutation   tests of the tests: every mutant of the CPU backend must make one fail'
	@echo 'make adversarial  full fault injection and fuzzing, of which make test runs a part'
	@echo 'make vllm-test  the plug-in in vLLM 0.26 and 0.32 on the CPU'
	@echo 'make clean      remove what was built                      make distclean   and .venv'
	@echo
	@sed -n 's/^#   /  /p' Makefile

SETUP = $(PYTHON) tools/setup.py --venv $(VENV) --torch $(TORCH) $(if $(filter 1,$(OFFLINE)),--offline) $(if $(filter 1,$(SUDO)),--sudo)
$(READY): tools/setup.py pyproject.toml
	@$(SETUP)
	@touch $@
$(VENV)/.ready-cuda: $(READY)
	@$(SETUP) --for cuda
	@touch $@

configure: build/build.ninja

$(CUDA_CHOICE):
	@mkdir -p build && rm -f build/.cuda-*
	@touch $@

build/build.ninja: $(READY) $(CUDA_READY) $(CUDA_CHOICE)
	cmake -S . -B build -G Ninja -DNSA_PYTHON=$(BIN)/python -DNSA_BUILD_CUDA=$(NSA_CUDA)
	@touch $@

# In place of the package's command, which would run a program that is built into the package.
LINK = ln -sf $(abspath build/bin/nsa) $(BIN)/nsa
program: build/build.ninja
	@ninja -C build -j $(JOBS)
	@$(LINK)

# The package is installed as a user would install it. Its own copy of libnsa comes out of ccache.
PACKAGE_SOURCES := pyproject.toml CMakeLists.txt src/CMakeLists.txt $(shell find cmake include src/core src/reference src/cpu src/cuda python -type f -not -name '*.pyc')
package: build/package.installed
build/package.installed: $(READY) $(CUDA_READY) $(CUDA_CHOICE) $(PACKAGE_SOURCES) | program
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-index --no-build-isolation .
	@$(LINK)
	@cd build && $(BIN)/python -c 'import nsa'
	@touch $@

build: program package

test: build
	@tools/test.sh

bench: build
	@bench/run.sh

demo: build
	@tools/demo.sh

mutation: build
	@$(BIN)/python tests/mutation/run.py

adversarial: build
	@tools/test.sh adversarial

# Ten minutes of CPU time; the first time it fetches a torch for the newer vLLM.
vllm-test: wheel
	@$(BIN)/nox -s vllm

# The wheel is built from the sdist, unpacked outside of git; libnsa comes out of ccache once more.
wheel: $(READY) $(CUDA_READY)
	@$(SETUP) --for wheel
	@rm -rf build/wheel dist && mkdir -p build/wheel dist
	export TMPDIR=$$(mktemp -d) && trap 'rm -rf $$TMPDIR' EXIT && CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  CCACHE_BASEDIR=$$TMPDIR $(BIN)/python -m build --no-isolation --outdir build/wheel .
	@tools/repair_wheel.sh build/wheel/*.whl dist
	@cp build/wheel/*.tar.gz dist
	@ls -l dist

docs: package
	@$(SETUP) --for docs
	@$(BIN)/python -m sphinx -q -W --keep-going -n -E -d build/doctrees docs build/docs
	@echo build/docs/index.html

# What a build needs on a machine without network and without these packages (it looks here first).
bundle:
	@mkdir -p bundle && cd bundle && rm -rf usr && \
	  apt-get download -q libcli11-dev libfmt-dev nlohmann-json3-dev libgtest-dev googletest \
	    libtomlplusplus-dev zlib1g zlib1g-dev libsentencepiece-dev libsentencepiece0 \
	    $$(apt-cache depends libfmt-dev | sed -n 's/ *Depends: //p') && \
	  for p in *.deb; do dpkg -x $$p .; done && rm -f *.deb && rm -rf usr/share/doc wheels && \
	  $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m pip download -q --no-deps --dest wheels \
	    $$(grep -om1 'transformers==[0-9.]*' ../pyproject.toml) && \
	  du -sh .

format: $(READY)
	@$(SETUP) --for lint
	@tools/format.sh

lint: build/build.ninja
	@$(SETUP) --for lint
	@tools/lint.sh

clean:
	rm -rf build build-python dist

distclean: clean
	rm -rf $(VENV)
