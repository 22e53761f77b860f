"""``python -m lab OUT THREADS``: inside process of a testnet in namespaces; ``lab.command`` starts it in a cell."""

import sys
from pathlib import Path

from lab import scenario as scenarios
from lab.inner_main import run_inside

if __name__ == "__main__":
    out, threads = Path(sys.argv[1]), int(sys.argv[2])
    scenario = scenarios.RealScenario.model_validate_json((out / "scenario.json").read_bytes())
    try:
        run_inside(out, scenario, "namespaces", threads)
    except KeyboardInterrupt:
        sys.exit(130)
