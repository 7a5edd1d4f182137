# Each target sets up what it needs (virtual environment, Paddle, compiled operators) and re-uses it the next time.
#   PADDLE=cpu|gpu   which build of Paddle; by default gpu only where an NVIDIA GPU works with it
#   PADDLE=plugin    the CPU build of Paddle 3, with a GPU through tools/device_plugin
#   PYTHON=...       the Python 3.11 or 3.12 to start from
#   ARGS=...         more arguments for pytest or the demo

PADDLE ?= auto
PYTHON ?= python3
python = @$(PYTHON) tools/environment.py --paddle $(PADDLE) --
tool = @$(PYTHON) tools/environment.py --paddle cpu --no-build -- -m
cpp_sources = $(shell find custom_ops -name '*.h' -o -name '*.cuh' -o -name '*.cc' -o -name '*.cu')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test build docs lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@sed -n 's/^#   /  /p' $(MAKEFILE_LIST)

demo: ## serve conversations whose KV cache does not fit, kill the server and start it again, prefill in another process; check every token
	$(python) examples/demo.py $(if $(filter plugin,$(PADDLE)),--device=gpu) $(ARGS)
	$(python) examples/restart.py $(if $(filter plugin,$(PADDLE)),--device=gpu)
	$(python) examples/prefill_decode.py

# Modules that need CuPy cannot be imported where there is none; any other import error fails the tests themselves.
test: ## all tests, and the examples in the docstrings
	$(python) -m pytest -q -n auto --dist loadfile tests --doctest-modules --doctest-ignore-import-errors paddle_kv $(ARGS)

build: ## compile the operators into paddle_kv/_lib
	$(python)

docs: export NO_MKDOCS_2_WARNING = 1
docs: ## the documentation as a site in build/site; a broken link is an error
	$(tool) mkdocs build --strict --quiet

lint: ## ruff, clang-format, mypy, and the list of operators
	$(tool) ruff check .
	$(tool) ruff format --check .
	@.venv/bin/clang-format --dry-run -Werror $(cpp_sources)
	$(tool) mypy
	@$(PYTHON) tools/gen_op_index.py --check

format: ## rewrite the sources the way lint wants them
	$(tool) ruff check --fix .
	$(tool) ruff format .
	@.venv/bin/clang-format -i $(cpp_sources)

clean: ## remove what was built (the virtual environments stay)
	rm -rf build dist out *.egg-info paddle_kv/_lib
	find paddle_kv tests tools -name __pycache__ -prune -exec rm -rf {} +
