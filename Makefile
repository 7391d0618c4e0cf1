# The two commands: `make demo` and `make test`. `make install` and `make check` are parts of them; `make nightly` repeats
# what `make test` does in small, often: properties in more examples too; `make bench` takes the figures of speed again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VISION := $(VENV)-vision
MPI := $(VENV)-mpi
PARALLEL = $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder
CHECKS = $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports

# Bytecode is kept whatever the environment says: tests start thousands of processes, and each would compile what it
# imports anew, each pytest all tests too.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test nightly bench check install clean

demo: install
	$(BIN)/vitscale run examples/quickstart.toml -o demo/results
	$(BIN)/vitscale report demo/results -o demo/report.html

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Tests wait for hosts, clusters and ranks now and then, so there are more of them at once than cores. The checks run
# beside them; what they say comes last. Beside the tests marked alone, which measure times, run only those that compute,
# in the time that the former leave; SIGUSR1 tells them that nothing is measured any more. Models of timm and torchvision
# are tested beside the first part, in an environment of their own.
test: install $(VISION)/.installed $(MPI)/.installed
	@failed=0; checks=$$(mktemp); computed=$$(mktemp); seen=$$(mktemp); { $(CHECKS); } > $$checks 2>&1 & checking=$$!; \
	computing=; seeing=; \
	trap 'exit 130' INT TERM; \
	trap 'kill $$checking $$computing $$seeing 2> /dev/null; rm -f $$checks $$computed $$seen' EXIT; \
	if [ -e $(VISION)/.installed ]; then $(VISION)/bin/python -m pytest tests/vision > $$seen 2>&1 & seeing=$$!; fi; \
	$(PARALLEL) -n 5 -m "not alone and not computing" || failed=1; \
	[ -z "$$seeing" ] || wait $$seeing || failed=1; seeing=; \
	wait $$checking || failed=1; checking=; \
	trap '' USR1; $(PARALLEL) -n 2 -m computing > $$computed 2>&1 & computing=$$!; trap - USR1; \
	$(BIN)/python -m pytest -m alone $(sort $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)) || failed=1; \
	kill -USR1 $$computing 2> /dev/null; wait $$computing || failed=1; computing=; \
	cat $$seen $$computed $$checks; \
	exit $$failed

nightly: install
	$(BIN)/python -m pytest -m 'nightly or hypothesis'
	$(BIN)/python tests/fuzzing.py --inputs 100000
	$(BIN)/python tests/kills.py --kills 10000

# On a machine that does nothing else; rewrites docs/benchmarks/README.md and what docs/calibration.md says of time.
bench: demo
	$(BIN)/python benchmarks/training_loop.py --write docs/benchmarks/README.md
	$(BIN)/python benchmarks/big_results.py $${TMPDIR:-/tmp}/vitscale-big --page docs/benchmarks/README.md --alone
	$(BIN)/python benchmarks/study_cost.py $${TMPDIR:-/tmp}/vitscale-study-cost --write docs/benchmarks/README.md
	$(BIN)/python benchmarks/soak.py $${TMPDIR:-/tmp}/vitscale-soak --write docs/benchmarks/README.md
	$(BIN)/python benchmarks/configurations.py --results demo/results --study examples/quickstart.toml --write docs/calibration.md
	[ "$$(id -u)" != 0 ] || $(BIN)/python benchmarks/engines_over_links.py --write docs/benchmarks/README.md

check: install
	$(CHECKS)

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt tools/check_torch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/check_torch_build.py constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# It may fail to be made, which leaves those tests out; the program says why.
$(VISION)/.installed: $(VENV)/.installed tools/make_vision_environment.py $(wildcard tools/vision_environment/*)
	$(BIN)/python tools/make_vision_environment.py $(VENV) $(VISION)

# Likewise: the mpirun of other MPIs than the machine's own.
$(MPI)/.installed: $(VENV)/.installed tools/make_mpi_environments.py
	$(BIN)/python tools/make_mpi_environments.py $(MPI)

clean:
	rm -rf $(VENV) $(VISION) $(MPI) demo build dist
