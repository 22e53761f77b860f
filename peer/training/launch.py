"""torch's launcher without its reports: ``python -m peer.training.launch RANKS``; a node reads how the ranks ended."""

from __future__ import annotations

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

PROGRAM = "peer.training.language_trainer"


def main(ranks: int) -> int:
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as its ranks: a service manager stops all processes
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-m", PROGRAM)
    except ChildFailedError as error:
        if (code := min(each.exitcode for each in error.failures.values())) < 0:
            os.kill(os.getpid(), -code)  # so that the node sees by which signal a rank ended
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
