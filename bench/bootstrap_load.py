"""What one bootstrap carries for a large swarm: relayed bytes, reservations, circuits, requests, memory and CPU.

Pure. Two peers that nobody can dial ("unreachable") exchange through a relay unless a hole can be punched. Any pair
whose target is unreachable is introduced by a circuit. Without punching such a pair keeps it; with punching it becomes
direct where one side can be dialed, and else in ``punched`` of the cases.

Peers with ``--relay`` carry as many circuits as a bootstrap; each unreachable peer has one reservation at a bootstrap
and one at such a peer, if there is one. Requests to a bootstrap have the intervals of ``p2ptrain.net``.

    python -m bench.bootstrap_load [--peers 10000] [--bootstraps 1] [--relays 0]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from p2ptrain.net import node
from p2ptrain.net.relay import neighbours, reachability
from p2ptrain.net.relay.relay import FOR_A_SERVER, OTHER_CONNECTIONS, RelayLimits

DHT_BYTES_S = 511_000 / 60
"""Bytes of the directory per second and peer, of a swarm of 10,000 (docs/results/FIGURES.md)."""
TRANSFER_RATE = 100e6 / 8
"""Bytes per second of a relayed exchange, each way."""


@dataclass(frozen=True, slots=True)
class SwarmCase:
    """A swarm and its relays."""

    peers: int = 10_000
    unreachable: float = 0.6
    """Share of peers that nobody can dial."""
    punched: float = 0.7
    """Share of pairs of unreachable peers that connect directly (arXiv 2510.27500: 70 % +- 7.1 %); 0: no punching, not
    even with peers that can be dialed."""
    exchange_bytes: float = 33.6e6
    """Bytes each way of an exchange: 70 million parameters in modular4."""
    exchanges_per_step: float = 1.0
    """Exchanges that each peer begins per outer step."""
    step_s: float = 600.0
    """Duration of an outer step. Guess: measure steps of volunteers' machines."""
    bootstraps: int = 1
    relays: int = 0
    """Peers with ``--relay``."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs on a server; measured by ``bench.relay_cost`` and ``bench.bootstrap_connections``."""

    relay_cpu_s_per_gb: float = 7.0
    connection_bytes: float = 140e3
    circuit_bytes: float = 1.2e6
    """Memory of a circuit at most: in each direction a read buffer, one read, and what waits to be sent."""
    connect_cpu_s: float = 0.0015
    """CPU seconds of a new connection: TLS handshake and identify."""
    request_cpu_s: float = 0.00125
    """CPU seconds of a request on a connection: a renewed reservation, a question about reachability."""


@dataclass(frozen=True, slots=True)
class BootstrapLoad:
    """Load of one bootstrap."""

    relayed_share: float
    """Share of all exchanges that a relay carries."""
    relayed_mbit_s: float
    """Relayed bytes, which come in and go out at this rate."""
    places_wanted: float
    """Reservations that peers want here."""
    circuits: float
    """Concurrent circuits, most of them idle: an introduction lasts one or two idle times."""
    renewals_per_s: float
    refusals_per_s: float
    """Requests of peers that find no room, at the longest backoff."""
    circuits_per_s: float
    greetings_per_s: float
    near_per_s: float
    dial_backs_per_s: float
    connects_per_s: float
    """New connections: peers whose connection was closed since their last request, as only some are kept."""
    dht_kb_s: float
    connections: float
    memory_mb: float
    """Memory of connections and circuits, as far as the limits admit them."""
    cores: float


def load(case: SwarmCase, costs: Costs | None = None, limits: RelayLimits = FOR_A_SERVER) -> BootstrapLoad:
    """Return the load of each bootstrap of the swarm; beyond the limits of a relay the numbers say what is missing."""
    costs = costs or Costs()
    both, target = case.unreachable**2, case.unreachable
    relayed = both * (1.0 - case.punched) if case.punched else target
    exchanges_per_s = case.peers * case.exchanges_per_step / case.step_s
    carriers = case.bootstraps + case.relays
    bytes_s = exchanges_per_s * relayed * 2 * case.exchange_bytes / carriers
    opened_per_s = exchanges_per_s * target / carriers
    transfer_s = relayed / target * case.exchange_bytes / TRANSFER_RATE if target else 0.0
    circuits = opened_per_s * (1.5 * limits.idle_s + transfer_s)
    places = case.peers * case.unreachable / case.bootstraps
    crowded = node.slower_in_a_crowd(1.0, min(case.peers, node.MAX_KNOWN_PEERS))
    renewals_per_s = min(places, limits.places) / reachability.ROUND_S
    pause_s = reachability.FULL_S if case.relays else reachability.OF_LINK_S[1]
    refusals_per_s = max(places - limits.places, 0.0) / pause_s
    greetings_per_s = case.peers / 2 / (node.REFRESH_S * crowded) / case.bootstraps
    near_per_s = case.peers / (neighbours.ROUND_S * crowded)
    dial_backs_per_s = case.peers / reachability.VERDICT_S / case.bootstraps
    guests = min(places, limits.places)
    kept_share = min(1.0, OTHER_CONNECTIONS / max(case.peers - guests, 1.0))
    strangers = 1.0 - guests / max(case.peers, 1)
    asked_per_s = refusals_per_s + greetings_per_s + near_per_s + dial_backs_per_s
    connects_per_s = asked_per_s * strangers * (1.0 - kept_share)
    connections = min(float(case.peers), guests + OTHER_CONNECTIONS) + 2 * min(circuits, limits.circuits)
    memory = connections * costs.connection_bytes + min(circuits, limits.circuits) * costs.circuit_bytes
    requests_per_s = asked_per_s + renewals_per_s + opened_per_s
    cores = bytes_s / 1e9 * costs.relay_cpu_s_per_gb
    cores += connects_per_s * costs.connect_cpu_s + requests_per_s * costs.request_cpu_s
    return BootstrapLoad(
        relayed_share=relayed,
        relayed_mbit_s=bytes_s * 8e-6,
        places_wanted=places,
        circuits=circuits,
        renewals_per_s=renewals_per_s,
        refusals_per_s=refusals_per_s,
        circuits_per_s=opened_per_s,
        greetings_per_s=greetings_per_s,
        near_per_s=near_per_s,
        dial_backs_per_s=dial_backs_per_s,
        connects_per_s=connects_per_s,
        dht_kb_s=DHT_BYTES_S / max(1.0 - case.unreachable, 1e-3) / 1e3,
        connections=connections,
        memory_mb=memory / 1e6,
        cores=cores,
    )


def main() -> None:
    case = SwarmCase()
    parser = argparse.ArgumentParser(description="Load of one bootstrap, with and without hole punching")
    parser.add_argument("--peers", type=int, default=case.peers)
    parser.add_argument("--bootstraps", type=int, default=case.bootstraps)
    parser.add_argument("--relays", type=int, default=case.relays, help="peers with --relay")
    given = parser.parse_args()
    found = {}
    for name, punched in (("punching", case.punched), ("without punching", 0.0)):
        swarm = SwarmCase(given.peers, punched=punched, bootstraps=given.bootstraps, relays=given.relays)
        found[name] = {key: round(value, 3) for key, value in asdict(load(swarm)).items()}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
