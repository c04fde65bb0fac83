# Everything is made on first use: system packages (apt), .venv, Horovod's wheel (minutes, once), this package.
# PYTHON=python3.12 chooses the interpreter of a new .venv, TORCH=2.12.0 and TENSORFLOW=2.20.0 choose other releases than those of
# constraints.txt, FRAMEWORKS=torch leaves TensorFlow out (docker/setup.sh).
.DEFAULT_GOAL := help
.PHONY: help setup test test-all sanitize package commands integrations outside slurm demo demo-ddp demo-tensorflow aarch64 docs lint types check clean
export PYTHON FRAMEWORKS TORCH TENSORFLOW HOROVOD_GPU

bin := .venv/bin

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install everything into .venv; about a second when that is done already
	@docker/setup.sh

# Every part of the tests runs, also after another has failed (ci/tests.py). Tests marked `full` are left to test-all.
test: setup lint types ## lint, types, then the quick tests: about 5 minutes on 2 cores
	$(bin)/python ci/tests.py

test-all: setup lint types ## the same with all tests and more examples: about 30 minutes on 2 cores
	$(bin)/python ci/tests.py --full

sanitize: setup ## test the compiled kernels, also with a million damaged messages, with the sanitizers; about 8 minutes
	$(bin)/python ci/sanitize.py

aarch64: setup ## test the compiled kernels for AArch64 in an emulator; Debian, as root
	$(bin)/python ci/aarch64.py

package: setup ## build sdist and wheel, and try each extra alone in a new environment; some minutes
	$(bin)/python ci/distributions.py

outside: setup ## run suites of tests that were written elsewhere, dense and with our exchange; HOROVOD=folder has Horovod's repository
	$(bin)/python ci/outside.py $(if $(HOROVOD),--horovod $(HOROVOD)) $(if $(PYTORCH),--pytorch $(PYTORCH))

commands: ## run every shell command of the README and docs/, each page in a fresh clone and environment; an hour
	python3 docs/quickstart.py

integrations: setup ## run the blocks of docs/libraries.md, docs/pytorch.md and docs/launching.md as scripts, and the examples with torchvision and Transformers; minutes
	$(bin)/python ci/integrations.py

slurm: setup ## train on a Slurm cluster of one node, in each of the ways of docs/launching.md; Debian, as root
	ci/slurm.sh

demo: ## train a small model on several processes, dense and sparse; sets up PyTorch alone if nothing is set up yet
	@docker/setup.sh demo
	$(bin)/python examples/demo.py

demo-ddp: ## the same with torch.distributed alone: no Horovod; kernels are compiled where there is a compiler
	@docker/setup.sh ddp
	$(bin)/python examples/demo.py --transport ddp

demo-tensorflow: setup ## the same with TensorFlow
	$(bin)/python examples/demo.py --framework tensorflow

# The theme prints an advertisement of its successor unless the variable is set.
# Without leave to install Chromium the site is built all the same, and not opened.
docs: setup ## build the site in build/site, a warning is an error, and open it in Chromium, which it installs; Python 3.11 or later
	-docker/system_packages.sh --browser
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet
	$(bin)/python ci/site.py

lint: setup ## ruff: style and layout; shellcheck and hadolint, which are published for x86-64 only
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/ruff format --check --line-length 80 *.md docs/*.md docs/evidence/*.md
	[ ! -x $(bin)/shellcheck ] || $(bin)/shellcheck --external-sources --severity warning docker/*.sh tools/*.sh ci/*.sh .ci/run
	[ ! -x $(bin)/hadolint ] || $(bin)/hadolint --failure-threshold warning docker/*.Dockerfile

# A test need not say first that a value is not None (union-attr): where it is None, the test fails.
# Each set of options has a cache of its own: runs with other options would empty it.
types: setup ## mypy
	$(bin)/mypy --cache-dir .mypy_cache/package horovod_sparse
	for folder in examples benchmarks studies docs ci "tests --disable-error-code union-attr --cache-dir .mypy_cache/tests"; do \
		MYPYPATH=.:benchmarks:examples:studies:docs $(bin)/mypy --follow-imports silent --allow-untyped-calls \
			--allow-untyped-decorators --allow-subclassing-any --implicit-reexport --no-warn-return-any $$folder || exit 1; \
	done

check: setup ## say what this machine can do
	$(bin)/horovod-sparse check

clean: ## remove .venv and what tools left; the cached Horovod wheel stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
