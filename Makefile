# `make help` lists the targets. Everything runs in .venv, built on first use.
PYTHON ?= python3.11
RELEASE ?= 0.32.0
JOBS ?= 2
RUN := .venv/bin/vllm-pr

.DEFAULT_GOAL := help
.PHONY: help setup demo test prove matrix newest upstream bench bench-full lint lint-upstream

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## build .venv (every other target does it on first use)
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "setup: no $(PYTHON) here: install Python 3.11, or name it with make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) vllm_pr/bootstrap.py

demo: setup ## the fault and the cure on a real DeepSeek-V4 engine, 4 minutes
	@$(RUN) demo

test: setup ## the upstream-bound tests on stock and changed, then the others; 20 to 30 minutes
	@$(RUN) prove
	@.venv/bin/python -m pytest -n $(JOBS) --dist loadfile vllm_pr/tests

prove: setup ## the upstream-bound tests only
	@$(RUN) prove

matrix: setup ## every release, stock and changed, on its real KVCacheManager
	@$(RUN) matrix

upstream: setup ## upstream's own tests of RELEASE on stock and changed; 12 minutes
	@$(RUN) upstream --release $(RELEASE)

bench: setup ## hit rates, cost per step, time to first token; 11 minutes
	@$(RUN) bench

bench-full: setup ## the same with all points
	@$(RUN) bench --full

lint: setup ## our own checks
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/typos

lint-upstream: setup ## upstream's own checks on the changed 0.33.0 tree
	@$(RUN) lint-upstream

newest: setup ## does the change go onto the newest vLLM that pip finds?
	@$(RUN) newest
