# p2ptrain: `make demo` trains a swarm on this machine, `make test` tests it. Everything lands in .venv and out.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OUT    := out/demo

.PHONY: help demo lab soak docker-testnet docker-check test check fuzz bench results results-quick install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a swarm of 3 peers on this machine and compare it to one alone (minutes)"
	@echo "make lab     scenarios that go wrong, acted out by real peers on hosts in network namespaces (root; two hours)"
	@echo "make soak    four peers for half an hour: does anything grow? (root)"
	@echo "make docker-testnet  a swarm in containers, of which one is killed and comes back (Docker; PAGE=8080 shows it)"
	@echo "make docker-check    the compose file: everybody healthy, some killed, one stopped, all taken down (Docker, compose)"
	@echo "make test    run all tests"
	@echo "make check   lint, format and types"
	@echo "make fuzz    search for inputs that break a decoder of what strangers send (ten minutes or more; Linux)"
	@echo "make bench   the figures of docs/results/FIGURES.md on this machine"
	@echo "make results        the experiments R1 to R11 of docs/results, resumable (hours; RESULTS='--only R1,R5' for a part)"
	@echo "make results-quick  a small part of them under out/ (minutes; not the evidence)"
	@echo "make clean   remove .venv, out and caches"

demo: $(STAMP)
	$(BIN)/p2ptrain testnet --preset demo --out $(OUT)

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
	$(BIN)/pytest -n 2 -m "not net and not lab"
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "net and not lab"
	.ci/docker

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy p2ptrain peer bootstrap lab

fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tests/fuzz/fuzz_campaign.py --out out/fuzz $(FUZZ)

bench: $(STAMP)
	$(BIN)/python -m bench

results: $(STAMP)
	$(BIN)/python -m bench.evidence $(RESULTS)

results-quick: $(STAMP)
	$(BIN)/python -m bench.evidence --quick $(RESULTS)

install: $(STAMP)

# Installed once, and again when the pins or the package's description change.
$(STAMP): setup.cfg pyproject.toml constraints.txt .ci/venv
	.ci/venv $(VENV)
	@echo 'installing p2ptrain and what it needs into $(VENV); torch is large, the first time takes minutes'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) out build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
