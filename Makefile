# make demo, make test: set up what is missing, build, run. Quick the second time. Variables:
#   CUDA=1|0        compile the CUDA kernels or not; unset: if a GPU is found (and for `make test` if nvcc is found)
#   PYTHON=/path    a Python that has torch 2.11.0, used instead of .venv's download
#   PRESET=debug    another preset of CMakePresets.json: asan-ubsan, tsan
#   SECONDS=10      of `make fuzz`, for each parser of files
PRESET  ?= release
JOBS    ?= $(shell nproc)
BUILD   := $(if $(filter release,$(PRESET)),build,build-$(patsubst asan-ubsan,asan,$(PRESET)))
BIN     := $(CURDIR)/.venv/bin
CMAKE   := $(BIN)/cmake
NVCC    := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA    ?= $(if $(NVCC),$(if $(filter test bundle bench,$(MAKECMDGOALS)),1,$(if $(wildcard /dev/nvidia0),1,0)),0)
PLAN    ?= plans/demo.toml
STUDY   ?= study/demo
SECONDS ?= 10
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
export CUDACXX := $(NVCC)
# Too large an allocation is the program's to report, under AddressSanitizer too.
export ASAN_OPTIONS ?= allocator_may_return_null=1

.PHONY: all setup build demo test fast fuzz bundle clean help
all: build

help:
	@sed -n '1,5p' Makefile; echo "targets: setup build demo test fast fuzz bundle clean"

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

bundle: TARGET = all
bundle: build
	@tools/bundle $(BUILD)

clean:
	rm -rf build build-*
