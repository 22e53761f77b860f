# p2ptrain: `make demo` trains a swarm on this machine, `make test` runs the tests. Output goes to .venv and out.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OUT    := out/demo

.PHONY: help demo demo-team lab soak docker-testnet docker-check test check fuzz bench results results-quick install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a swarm of 3 peers on this machine and compare it with a solo run (minutes)"
	@echo "make demo-team  the same with a peer on two devices (minutes)"
	@echo "make lab     run fault scenarios with real peers in network namespaces (root; several hours)"
	@echo "make soak    run four peers for half an hour and check for leaks (root)"
	@echo "make docker-testnet  run a swarm in containers; one is killed and returns (Docker; PAGE=8080 shows it)"
	@echo "make docker-check    test the compose file on this machine (Docker, Compose)"
	@echo "make test    run all tests"
	@echo "make check   check lint, format and types"
	@echo "make fuzz    draw new inputs for property tests and decoders of network input (ten minutes or more; Linux)"
	@echo "make bench   measure the figures of docs/results/FIGURES.md on this machine"
	@echo "make results        run the experiments of docs/results, resumable (hours; RESULTS='--only R1,R5' for a part)"
	@echo "make results-quick  run a small version of them under out/ (minutes; not evidence)"
	@echo "make clean   remove .venv, out and caches"

demo: $(STAMP)
	$(BIN)/p2ptrain testnet --preset demo --out $(OUT)

demo-team: $(STAMP)
	$(BIN)/p2ptrain testnet --preset demo --devices cpu,cpu --out out/demo-team

lab: $(STAMP)
	.ci/net
	@status=0; \
	echo "$(BIN)/p2ptrain testnet --scenario tests/scenarios --stage namespaces --out out/lab"; \
	$(BIN)/p2ptrain testnet --scenario tests/scenarios --stage namespaces --out out/lab || status=1; \
	echo "$(BIN)/pytest -m lab"; \
	$(BIN)/pytest -m lab || status=1; \
	exit $$status

soak: $(STAMP)
	.ci/net
	$(BIN)/p2ptrain testnet --scenario tests/scenarios/long --stage namespaces --out out/soak

docker-testnet: $(STAMP)
	$(BIN)/p2ptrain testnet --stage docker --scenario docker/testnet.toml --out out/docker $(if $(PAGE),--page $(PAGE))

docker-check: $(STAMP)
	$(BIN)/python docker/check.py

test: $(STAMP)
	.ci/net
	$(BIN)/pytest -n 3 -m "not net and not lab"
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "net and not lab"
	.ci/docker

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy p2ptrain peer bootstrap lab sim

fuzz: $(STAMP)
	$(BIN)/pytest -n 3 -m "not net and not lab" --hypothesis-profile=default $$(grep -rl --include='test_*.py' '@given' tests)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tests/fuzz/fuzz_campaign.py --out out/fuzz $(FUZZ)

bench: $(STAMP)
	$(BIN)/python -m bench

results: $(STAMP)
	$(BIN)/python -m bench.evidence $(RESULTS)

results-quick: $(STAMP)
	$(BIN)/python -m bench.evidence --quick $(RESULTS)

install: $(STAMP)

# Installs once, and again when the pins or the package metadata change.
$(STAMP): setup.cfg pyproject.toml constraints.txt .ci/venv
	.ci/venv $(VENV)
	@echo 'installing p2ptrain and its dependencies into $(VENV); torch is large, the first time takes minutes'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) out build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
