# `make help` lists the targets. Everything runs in .venv, built on first use.
PYTHON ?= python3.11
RUN := .venv/bin/vllm-pr

.DEFAULT_GOAL := help
.PHONY: help setup

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## build .venv (every other target does it on first use)
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "setup: no $(PYTHON) here: install Python 3.11, or name it with make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) vllm_pr/bootstrap.py
