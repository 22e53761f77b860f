"""``python -m lab OUT THREADS``: inside process of a testnet in namespaces; ``lab.command`` starts it in a cell."""

import sys
from pathlib import Path

from lab.inner_main import run_inside
from p2ptrain.sim import testbed_fields

if __name__ == "__main__":
    out, threads = Path(sys.argv[1]), int(sys.argv[2])
    scenario = testbed_fields.RealScenario.model_validate_json((out / "scenario.json").read_bytes())
    try:
        run_inside(out, scenario, "namespaces", threads)
    except KeyboardInterrupt:
        sys.exit(130)
