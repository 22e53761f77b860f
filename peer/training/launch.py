"""torch's launcher without its reports: ``python -m peer.training.launch RANKS [HOST:PORT NODES NODE]``.

A node, or ``p2ptrain rank``, reads from its exit status how the ranks ended. They talk on the named address's interface
alone; without one, on loopback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from p2ptrain.base.errors import UserError
from p2ptrain.base.launcher import end_with_parent
from peer.training.lan_address import LanAddress, interface_of
from peer.training.plan import LAUNCHER, OWNERS_FAULT
from peer.training.rendezvous import BACKEND, Rendezvous, own_interface

PROGRAM = "peer.training.language_trainer"
JOIN_S = 600
"""Longest wait of torch's launchers for each other, after all have met."""


def main(ranks: int, at: LanAddress | None, nodes: int, node: int) -> int:
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as its ranks: a service manager stops all processes
    end_with_parent(os.getppid())
    os.environ[LAUNCHER] = str(os.getpid())
    rendezvous_handler_registry.register(BACKEND, Rendezvous.of)
    try:
        host, port = ("127.0.0.1", 0) if at is None else (at.host, at.port)
        name = own_interface(at) if at is not None and node else interface_of(host)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=ranks,
            run_id=BACKEND,
            rdzv_backend=BACKEND,
            rdzv_endpoint=f"{host}:{port}",
            rdzv_configs={"node": node, "timeout": JOIN_S},
            local_addr=host,
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle="SIGQUIT",
        )
        elastic_launch(config, sys.executable)("-P", "-m", PROGRAM)
    except ChildFailedError as error:
        codes = {each.exitcode for each in error.failures.values()}
        if min(codes) < 0:
            os.kill(os.getpid(), -min(codes))  # so that the node sees by which signal a rank ended
        return OWNERS_FAULT if OWNERS_FAULT in codes else 1
    except UserError as error:
        sys.stderr.write(f"Error: {error}\n")
        return OWNERS_FAULT
    except RendezvousConnectionError as error:
        sys.stderr.write(f"The team did not meet: {error}.\n")
        return 1
    return 0


if __name__ == "__main__":
    given = sys.argv[1:]
    place = LanAddress.parse(given[1]) if len(given) > 1 else None
    sys.exit(main(int(given[0]), place, int(given[2]) if place else 1, int(given[3]) if place else 0))
