# make demo, make test: set up what is missing, build, run. Quick the second time. Variables:
#   CUDA=1|0        compile the CUDA kernels or not; unset: `make test` does if nvcc is found, others if the folder does or a GPU is found
#   PYTHON=/path    a Python that has torch 2.11.0, used instead of .venv's download
#   PRESET=debug    another preset of CMakePresets.json: asan-ubsan, tsan
#   SECONDS=10      of `make fuzz`, for each parser of files
#   MODEL=, DATA=, TASKS=   of `make test-clients`: a model, a folder with documents, and tasks
PRESET  ?= release
JOBS    ?= $(shell nproc)
BUILD   := $(if $(filter release,$(PRESET)),build,build-$(patsubst asan-ubsan,asan,$(PRESET)))
BIN     := $(CURDIR)/.venv/bin
CMAKE   := $(BIN)/cmake
NVCC    := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
CONFIGURED := $(shell sed -n 's/^ASSAY_CUDA:BOOL=//p' $(BUILD)/CMakeCache.txt 2>/dev/null)
CUDA    ?= $(if $(NVCC),$(if $(filter test bundle,$(MAKECMDGOALS)),1,$(or $(CONFIGURED),$(if $(wildcard /dev/nvidia0),1,0))),0)
PLAN    ?= plans/demo.toml
STUDY   ?= study/demo
SECONDS ?= 10
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
export CUDACXX := $(NVCC)
# Too large an allocation is the program's to report, under a sanitizer too. libtorch is not instrumented.
export ASAN_OPTIONS ?= allocator_may_return_null=1
export TSAN_OPTIONS ?= allocator_may_return_null=1:ignore_noninstrumented_modules=1

.PHONY: all setup build demo test fast fuzz test-slurm test-clients bundle clean help
all: build

help:
	@sed -n '1,6p' Makefile; echo "targets: setup build demo test fast fuzz test-slurm test-clients bundle clean"

setup: .venv/ready

.venv/ready: tools/setup tools/requirements.txt tools/requirements-test.txt
	@PYTHON="$(PYTHON)" tools/setup

build: .venv/ready
	@echo "== build ($(PRESET), CUDA kernels: $(if $(filter 1,$(CUDA)),yes,no))"
	@PATH="$(BIN):$$PATH" $(CMAKE) --preset $(PRESET) -DASSAY_CUDA=$(CUDA) $(if $(PYTHON),-DASSAY_PYTHON=$(PYTHON)) --log-level=WARNING >/dev/null
	@PATH="$(BIN):$$PATH" $(CMAKE) --build $(BUILD) -j $(JOBS) $(if $(TARGET),--target $(TARGET))

demo: TARGET = assay_cli
demo: build
	@echo "== demo: $(PLAN) into $(STUDY)"
	@$(BUILD)/assay run $(PLAN) -o $(STUDY) --jobs $(JOBS)

test: build
	@echo "== test"
	@$(BIN)/ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

fast: build
	@$(BIN)/ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS) -LE "slow|cuda"

# Inputs that break a parser are written to build-fuzz/findings.
fuzz:
	@$(MAKE) --no-print-directory build PRESET=fuzz CUDA=0 TARGET=fuzz_parsers
	@tools/fuzz build-fuzz $(SECONDS)

# Slurm's packages bring daemons, so `make test` does not install them; it runs these tests where they
# are installed. The tests start daemons of their own, which end with them.
test-slurm: build
	@dpkg -s slurmctld slurmd slurm-client munge >/dev/null 2>&1 || \
	  $(if $(filter-out root,$(shell whoami)),sudo) apt-get install -y -qq --no-install-recommends \
	    slurmctld slurmd slurm-client munge >/dev/null
	@$(BIN)/ctest --test-dir $(BUILD) --output-on-failure -R Slurm

# lm-evaluation-harness and transformers need 770 MB in addition to torch, so `make test` does not
# install them.
CLIENTS := .venv-clients
CLIENT_PYTHON = $(or $(PYTHON),$(BIN)/python)
$(CLIENTS)/ready: tools/requirements-clients.txt .venv/ready
	@echo "== $(CLIENTS): $$(paste -sd' ' tools/requirements-clients.txt)"
	@$(CLIENT_PYTHON) -m venv $(CLIENTS)
	@$(CLIENT_PYTHON) -c 'import torch; print(torch.__path__[0] + "/..")' \
	  > $$($(CLIENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/torch.pth
	@$(CLIENTS)/bin/pip install -q --disable-pip-version-check -r tools/requirements-clients.txt
	@touch $@

test-clients: TARGET = assay_cli
test-clients: $(CLIENTS)/ready build
	@$(BIN)/ctest --test-dir $(BUILD) --output-on-failure -L clients
	@$(if $(MODEL),$(CLIENTS)/bin/python tools/compare-lm-eval $(MODEL) --assay $(BUILD)/assay \
	  --data $(DATA) --limit 200 $(if $(TASKS),--tasks $(TASKS)))

bundle: TARGET = all
bundle: build
	@tools/bundle $(BUILD)

clean:
	rm -rf build build-*
