"""``python -m peer.lab OUT THREADS``: the inside of a testnet in namespaces; ``lab.command`` starts it in a cell."""

import sys
from pathlib import Path

from p2ptrain.sim import reality
from peer.lab.play import play

if __name__ == "__main__":
    out, threads = Path(sys.argv[1]), int(sys.argv[2])
    scenario = reality.RealScenario.model_validate_json((out / "scenario.json").read_bytes())
    try:
        play(out, scenario, "namespaces", threads)
    except KeyboardInterrupt:
        sys.exit(130)
