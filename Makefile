# make train   sets everything up and runs the main job        (ARGS="--recipe stock" passes options on)
# make test    sets everything up and runs all tests           (ARGS="-k layer_norm" goes to pytest; SANITIZE=1: and
#              what make sanitize does, into the same count)
# make fuzz    random inputs against the numerics contract     (N=100000 cases; ARGS="--ops layer_norm --seed 7")
# make sanitize  the CPU kernels under sanitizers, in every instruction set of this processor (needs g++)
# make build   the set-up alone: .venv with torch, and the build
# make lint    the formatters and type checks
#
# What is there is not done again. PYTHON chooses the interpreter, TORCH the torch to install ("torch>=2.9").
PYTHON ?= python3
TORCH ?= torch>=2.9
VENV ?= .venv
BUILD ?= build
ARGS ?=
N ?= 1000000
SANITIZE ?=

BIN := $(VENV)/bin
CMAKE := $(BIN)/cmake
export PATH := $(abspath $(BIN)):$(PATH)
export ALLFINITE_BUILD_DIR := $(abspath $(BUILD))
# What the tests need may depend on torch, too, and must not bring another one: the library is built for this one.
INSTALLED_TORCH = "torch==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')"
# pip's complaints about the version of pip are no news to anybody.
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: build test sanitize sanitized_library fuzz train lint clean
.DELETE_ON_ERROR:

$(VENV)/.torch:
	@scripts/require_system.sh build
	@echo "AllFinite: making $(VENV) and installing torch, cmake and ninja (a few minutes once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q "$(TORCH)" numpy cmake ninja "setuptools>=77" wheel
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml setup.py
	@echo "AllFinite: building the library"
	@$(CMAKE) -S . -B $(BUILD) -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python
	@$(CMAKE) --build $(BUILD)
	@echo "AllFinite: installing the package into $(VENV), editable"
	@$(BIN)/python -m pip install -q --no-build-isolation -e ".[train]"
	@touch $@

build: $(VENV)/.package
	@$(CMAKE) --build $(BUILD)
	@$(CMAKE) --install $(BUILD) --prefix python/allfinite >/dev/null
	@$(BIN)/python -c "import allfinite; print('AllFinite', allfinite.__version__, 'is built; python -m allfinite info says with what')"

$(VENV)/.test: $(VENV)/.package
	@echo "AllFinite: installing what the tests need"
	@$(BIN)/python -m pip install -q --no-build-isolation -e ".[test]" $(INSTALLED_TORCH)
	@touch $@

test: build $(VENV)/.test $(if $(SANITIZE),sanitized_library)
	@scripts/require_system.sh test
	@echo "AllFinite: building the C++ tests"
	@$(CMAKE) -S . -B $(BUILD) -DALLFINITE_TESTS=ON >/dev/null
	@$(CMAKE) --build $(BUILD)
	@$(BIN)/python scripts/run_tests.py $(BUILD) $(if $(SANITIZE),--sanitize) $(ARGS)

sanitized_library: build
	@echo "AllFinite: building the CPU kernels with sanitizers"
	@$(CMAKE) -S . -B $(BUILD) -DALLFINITE_SANITIZE=ON >/dev/null
	@$(CMAKE) --build $(BUILD) --target allfinite_sanitized

sanitize: sanitized_library $(VENV)/.test
	@$(BIN)/python scripts/run_sanitized.py $(BUILD)

fuzz: build $(VENV)/.test
	@PYTHONPATH=tests/python $(BIN)/python -m contract --cases $(N) --summary $(BUILD)/fuzz/summary.md $(ARGS)

train: build
	@$(BIN)/python -m allfinite train $(ARGS)

$(VENV)/.lint: $(VENV)/.package
	@echo "AllFinite: installing the linters"
	@$(BIN)/python -m pip install -q --no-build-isolation -e ".[lint]"
	@touch $@

lint: $(VENV)/.lint
	@git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

clean:
	rm -rf $(BUILD) python/allfinite/lib python/allfinite/include python/allfinite/share
	rm -f python/allfinite/_C*.so python/allfinite/_build_info.py
