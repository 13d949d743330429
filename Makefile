# Each target makes what it needs: a virtual environment in .venv (stamp files say which extras are in it), then runs.
# make demo | MODEL=path.onnx [SHAPES='B=1,L=8 B=4,L=61'] make demo | make test | make test-long | make test-cuda | make unit | make checked | make lint | make types | make layout
# Jobs of continuous integration (.github/workflows): make lint types unit | make test | BASE=commit make replay-difference | make nightly-fuzz | make test-newest | make docs | make sdist wheel | make release-test
# MODEL=path.onnx [SHAPES=...] [THREADS='1 2'] [ARGS=...] make bench | MODEL=... SHAPES=... make shortfall | make opening
# make bench-gemm | make bench-stitch | make bench-cpu | make bench-fusion | SEEDS=500 [TARGET=cpu] make fuzz | make fuzz-layers | make fuzz-models | make fuzz-long | make fuzz-ort | make fuzz-torch | make fuzz-shapes | make damage | make damage-artifacts | make shape-inference | make conformance | make schemas | make guards | make numerics | make single | make emulate | make pycuda-test | make pycuda-emulate | make gpu-pack | make gpu | make gpu-rehearsal | make gpu-after | make models | make release-test | make arm-test | make serving | make wheel | make clean | make compilers-test | make sanitize | make analyze | MINUTES=15 make soak | KILLS=100 make kills
PYTHON ?= python3
MODEL  ?= tests/data/bert_tiny.onnx
SHAPES ?=
THREADS ?= 1 2
SEEDS  ?= 500
TARGET ?= cpu
PROGRAM ?= tests/data/versions/program7.7.polydyn
MODELS ?= benchmarks/out/models
EMULATED ?= $(wildcard tests/data/*_tiny.onnx)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo torch test test-long test-cuda unit lint types check checked pool-tsan bench bench-gemm bench-stitch bench-cpu bench-fusion shortfall opening fuzz fuzz-layers fuzz-models fuzz-long fuzz-ort fuzz-torch fuzz-shapes damage damage-artifacts shape-inference conformance schemas guards accuracy numerics single emulate pycuda-test pycuda-emulate gpu gpu-pack gpu-rehearsal gpu-after models tiny-models replay replay-difference layout nightly-fuzz test-newest docs docs-browser release-test arm-test serving sdist wheel clean compilers-test sanitize analyze soak kills

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit("polydyn needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	touch $@

# One stamp per extra; setup.cfg is a prerequisite because it names the dependencies.
$(VENV)/.extra-%: $(VENV)/.made setup.cfg pyproject.toml
	$(PIP) -e '.[$*]'
	touch $@

# A real model compared with ONNX Runtime by `polydyn try`; installs what that needs and no more.
demo: $(VENV)/.extra-fallback
	$(BIN)/python -m benchmarks.demo $(if $(filter file,$(origin MODEL)),,$(MODEL) $(SHAPES))

# Each process takes half of the files, in order: what a module has compiled, its tests share.
test: $(VENV)/.extra-test
	$(BIN)/python -m pytest -n auto --dist worksteal

# What `make test` leaves out: larger models, further parameters of cases that it has.
test-long: $(VENV)/.extra-test
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

# All tests of CUDA kernels on the emulation, for changes of codegen/cuda, codegen/device or of what is below the schedules.
test-cuda: $(VENV)/.extra-test
	$(BIN)/python -m pytest -n auto --dist worksteal -m "" tests/cuda

# The suite to run all day: no compiler, no case that takes seconds; about a minute on two cores.
unit: $(VENV)/.extra-test
	$(BIN)/python -m pytest -n auto --dist worksteal tests/unit -m "not slow and not compiler and not heavy"

lint: $(VENV)/.extra-lint
	$(BIN)/ruff check .

types: $(VENV)/.extra-lint
	$(BIN)/mypy

# The rules of the house: imports between rooms, file lengths, links of documents, workflows. Seconds.
layout: $(VENV)/.extra-test
	$(BIN)/python -m pytest tests/unit/house

check: lint types test

# The suite with the newest release of every dependency, in a new environment; PRE=--pre takes pre-releases too.
PRE    ?=
NEWEST := .venv-newest
test-newest:
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager $(PRE) -e '.[test]'
	$(NEWEST)/bin/python -m pip freeze
	$(NEWEST)/bin/python -m pytest -n auto --dist worksteal

checked: $(VENV)/.extra-test
	$(BIN)/python -m pytest tests/kernels/test_checked.py -m ""

# The pool of threads under the thread sanitizer, hammered (tests/c/pool_hammer.c); a minute.
pool-tsan: $(VENV)/.extra-test
	$(BIN)/python -m pytest tests/robustness/test_pool.py -m "" -k data_race

# Generated programs and their run time under gcc's sanitizers, then the execution provider (docs/trust.md); half an hour.
# ARGS: models, --random, --kind
sanitize: $(VENV)/.extra-test
	$(BIN)/python -m tests.support.sanitized $(ARGS)
	$(BIN)/python -m tests.support.sanitized_provider

# The C of the run time and of the provider by gcc -fanalyzer and, if it is on the path, clang-tidy (pip install clang-tidy); a minute.
analyze: $(VENV)/.extra-test
	$(BIN)/python -m tests.support.analyzed

# One process in forks, signals, full disks and shared caches, its memory measured; and actions killed at random times.
MINUTES ?= 15
KILLS   ?= 100
SEED    ?= 0
soak: $(VENV)/.extra-test
	mkdir -p benchmarks/out
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED) --out benchmarks/out/soak.json --picture benchmarks/out/soak.svg $(ARGS)

kills: $(VENV)/.extra-test
	$(BIN)/python -m benchmarks.kills --kills $(KILLS) --seed $(SEED) $(ARGS)

# Rivals that are not installed are named and left out. ARGS: --quick, --rounds, --seconds, --also openvino, ...
ARGS   ?=
bench: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.cpu_all $(MODEL) $(if $(SHAPES),--shapes $(SHAPES)) --threads $(THREADS) $(ARGS)

shortfall: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.shortfall $(MODEL) $(SHAPES) --threads $(THREADS) $(ARGS)

opening: models
	$(BIN)/python -m benchmarks.opening $(MODELS)/bert_base.onnx $(ARGS)

fuzz: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.fuzz $(SEEDS) --target $(TARGET)

# Random models of a few layers on the emulated GPU, against ONNX Runtime. ARGS: --first, --family, --dtype, --sm, --forced
fuzz-layers: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.fuzz_layers $(SEEDS) $(ARGS)

# Random ONNX models, each evaluated after every pass and compiled, against ONNX Runtime and onnx.reference.
# ARGS: --first, --jobs, --compile N, --plan N, --foreign N, --theme NAME, --out FOLDER for what fails
fuzz-models: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.fuzz_models $(SEEDS) $(ARGS)

# Random models in the cells of a pairwise matrix: targets, passes, tiles, precision, compilers (docs/fuzzing.md). What fails is in
# benchmarks/out/fuzz, what was reached in coverage.md there. ARGS: --jobs, --cell, --theme
fuzz-long: $(VENV)/.extra-test $(VENV)/.extra-compiler
	mkdir -p benchmarks/out/fuzz
	$(BIN)/python -m polydyn fuzz --models $(SEEDS) --first $(FIRST) --out benchmarks/out/fuzz --coverage benchmarks/out/fuzz/coverage.md $(ARGS)

# Random models in sessions of ONNX Runtime with the provider, random nodes refused, against ONNX Runtime alone
fuzz-ort: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.fuzz_ort $(SEEDS) $(ARGS)

# What a nightly job fuzzes. FIRST is the first seed: another one each night tests other cases.
FIRST ?= 0
nightly-fuzz: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.fuzz $(SEEDS) --first $(FIRST)
	$(BIN)/python -m polydyn.testing.fuzz_models $(SEEDS) --first $(FIRST)
	$(BIN)/python -m polydyn fuzz --models $(SEEDS) --first $(FIRST) --out benchmarks/out/fuzz
	$(BIN)/python -m polydyn.testing.fuzz_layers 50 --first $(FIRST)
	$(BIN)/python -m polydyn.testing.fuzz_shapes $(SEEDS) --first $(FIRST)
	$(BIN)/python -m polydyn.testing.damage 3000 --first $(FIRST)
	$(BIN)/python -m polydyn.testing.fuzz_ort 50 --first $(FIRST)

# torch.compile beside eager torch: every function of torch's own table, and random modules; needs the extra [torch]
fuzz-torch: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.fuzz_torch $(SEEDS) $(ARGS)

# Damaged files: each is read, or refused with an error that names its place. ARGS: --first, --jobs, --seconds, --memory
damage: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.damage 3000 $(ARGS)

# Damaged programs, read in Python and opened in C under sanitizers. ARGS: --first
damage-artifacts: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.damage_artifacts $(PROGRAM) 3000 --sanitize $(ARGS)

fuzz-shapes: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.fuzz_shapes $(SEEDS)
	POLYDYN_EXAMPLES=$(SEEDS) $(BIN)/python -m pytest -q tests/unit/shapes/test_shape_facts.py tests/unit/shapes/test_dims.py

shape-inference: $(VENV)/.extra-bench models
	$(BIN)/python -m benchmarks.shape_inference $(MODELS)/*.onnx

# ONNX's node cases, compiled for the CPU. ARGS: part of a case's name, --reference, --dims all|each, --jobs, --json
conformance: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.conformance $(ARGS)

schemas: $(VENV)/.extra-test
	$(BIN)/python -m polydyn.testing.schemas $(ARGS)

guards: $(VENV)/.extra-bench models
	$(BIN)/python -m benchmarks.guards $(MODELS)/*.onnx

# torch.compile(backend="polydyn"): its tests, and ten models beside eager torch. ARGS: names, --time 20 ...
torch: $(VENV)/.extra-test $(VENV)/.extra-torch $(VENV)/.extra-export
	$(BIN)/python -m pytest tests/models/test_torch.py
	$(BIN)/python -m benchmarks.torch_models $(ARGS)

# PyTorch is a rival here, so the extra that exports models is needed too. ARGS: as above, and --only FAMILY ...
bench-gemm: $(VENV)/.extra-bench $(VENV)/.extra-export
	$(BIN)/python -m benchmarks.gemm --threads $(THREADS) $(ARGS)

bench-stitch: $(VENV)/.extra-bench $(VENV)/.extra-export
	$(BIN)/python -m benchmarks.stitch --threads $(THREADS) $(ARGS)

bench-fusion: models
	$(BIN)/python -m benchmarks.fusion $(MODELS) --gemms

bench-cpu: models
	$(BIN)/python -m benchmarks.cpu_all $(MODELS) --threads $(THREADS) $(ARGS)

accuracy: $(VENV)/.extra-bench models
	$(BIN)/python -m benchmarks.accuracy $(MODELS)

# Distances to float64 of polydyn and of ONNX Runtime (docs/numerics.md)
numerics: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.numerics tests/data --families $(ARGS)

# Models of one operator beside ONNX Runtime, the slowest first. ARGS: --only, --type, --sample, --seed, --resume, --record
single: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.single $(ARGS)

emulate: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.gpu.emulated $(EMULATED)

# The same and the tests of the GPU side with pycuda, in an environment of its own: pycuda has no wheels, so one is built
# with the headers of the CUDA toolkit and the CPU libcuda (two minutes). Where it is installed, devices are opened by it.
PYCUDA := .venv-pycuda
$(PYCUDA)/.made: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(PYCUDA)
	$(PYCUDA)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,bench]'
	touch $@

$(PYCUDA)/.pycuda: benchmarks/gpu/pycuda_wheels.py | $(PYCUDA)/.made
	$(PYCUDA)/bin/python -m benchmarks.gpu.pycuda_wheels $(PYCUDA)/wheels
	$(PYCUDA)/bin/python -m pip install --quiet --disable-pip-version-check --find-links $(PYCUDA)/wheels pycuda
	touch $@

pycuda-test: $(PYCUDA)/.made $(PYCUDA)/.pycuda
	$(PYCUDA)/bin/python -m pytest tests/cuda

pycuda-emulate: $(PYCUDA)/.made $(PYCUDA)/.pycuda
	$(PYCUDA)/bin/python -m benchmarks.gpu.emulated $(EMULATED) --driver pycuda $(ARGS)

# For a day with a GPU: make gpu-pack here (five minutes), then there CALL=1 make gpu (and 2, 3), then here
# REPORTS="FOLDER ..." make gpu-after. make gpu-rehearsal: all of it on the CPU, faults planted, in a PYTHON312 with numpy alone.
# CPU=1 make gpu-pack: another pack, of the wheels that benchmarks.gpu.cpu needs there.
CPU       ?=
PACK      ?= benchmarks/out/gpu$(if $(CPU),-cpu).tar.xz
CALL      ?= 1
PYTHON312 ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python $(PYTHON); do \
	if $$p --version >/dev/null 2>&1; then echo $$p; break; fi; done)
REPORTS   ?= benchmarks/out/gpu
gpu-pack: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.gpu.pack $(PACK) $(if $(CPU),--cpu 3.12,--pycuda $(PYTHON312)) $(ARGS)

gpu:
	$(PYTHON) -m benchmarks.gpu.run_all --pack $(PACK) --call $(CALL) $(ARGS)

gpu-rehearsal: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.gpu.rehearsal --python $(PYTHON312) $(ARGS)

gpu-after: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.gpu.after $(REPORTS) $(ARGS)

models: $(VENV)/.extra-export $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.models.export $(MODELS) all

tiny-models: $(VENV)/.extra-export $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks.models.export tests/data tiny

# Digests of all that compiling writes: OUT=before.gz make replay; change; OUT=after.gz make replay; then replay compare.
OUT    ?= benchmarks/out/replay.gz
replay: $(VENV)/.extra-test
	mkdir -p $(dir $(OUT))
	$(BIN)/python -m benchmarks.replay write $(OUT) $(ARGS)

# What a change does to the texts of kernels: replay of BASE (a commit) and of this tree, compared. Exit code 1: a kernel differs.
BASE   ?= HEAD
REPLAY := benchmarks/out/replay
replay-difference: $(VENV)/.extra-test
	rm -rf $(REPLAY)
	mkdir -p $(REPLAY)/base
	git archive $(BASE) | tar -x -C $(REPLAY)/base
	cd $(REPLAY)/base && $(CURDIR)/$(BIN)/python -m benchmarks.replay write $(CURDIR)/$(REPLAY)/base.gz $(ARGS)
	$(BIN)/python -m benchmarks.replay write $(REPLAY)/change.gz $(ARGS)
	$(BIN)/python -m benchmarks.replay compare $(REPLAY)/base.gz $(REPLAY)/change.gz

# The documentation as pages that load nothing: benchmarks/out/site/index.html. Links, anchors and the search are checked.
docs: $(VENV)/.extra-docs
	$(BIN)/python -m zensical build --clean --strict
	$(BIN)/python -m docs.site_check benchmarks/out/site

# Pages in headless Chromium (Debian's package chromium): two widths, both themes, contrast, search. ARGS: pages, --shots FOLDER
docs-browser: docs $(VENV)/.extra-browser
	$(BIN)/python -m docs.site_browser benchmarks/out/site $(ARGS)

# The wheel and the sdist in clean environments of every Python from 3.10 that is here: docs/quickstart.md passes there.
release-test: $(VENV)/.extra-test
	$(BIN)/python -m pytest tests/cli/test_release.py -m ""

# NEON code, cross-compiled and executed by qemu. Debian's packages: gcc-aarch64-linux-gnu qemu-user
arm-test: $(VENV)/.extra-test
	@aarch64-linux-gnu-gcc --version >/dev/null && qemu-aarch64 --version >/dev/null
	$(BIN)/python -m pytest tests/robustness/test_arm64.py -m ""

# Chosen tests with gcc, clang and zig, those that are here; what is missing is named. ARGS: --only zig, files of tests
compilers-test: $(VENV)/.extra-test $(VENV)/.extra-compiler
	$(BIN)/python -m tests.support.compilers $(ARGS)

# The server of docs/serving.md under load on 127.0.0.1, beside ONNX Runtime. ARGS: a model, --rates 5 20 ...
serving: $(VENV)/.extra-test $(VENV)/.extra-serve
	$(BIN)/python -m benchmarks.serving $(ARGS)

sdist: $(VENV)/.extra-test
	rm -rf build
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")'

wheel: $(VENV)/.made
	rm -rf build
	POLYDYN_OBJECTS=0 $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(PYCUDA) $(NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
