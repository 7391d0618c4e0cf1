# The two commands: `make demo` and `make test`. `make install` and `make check` are parts of them; `make nightly` repeats
# what `make test` does in small, often.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test nightly check install clean

demo: install
	$(BIN)/vitscale run examples/quickstart.toml -o demo/results
	$(BIN)/vitscale report demo/results -o demo/report.html

test: install check
	@failed=0; \
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone" || failed=1; \
	$(BIN)/python -m pytest -m alone || failed=1; \
	exit $$failed

nightly: install
	$(BIN)/python -m pytest -m nightly

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt tools/check_torch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/check_torch_build.py constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist
