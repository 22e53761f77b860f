"""Fuzz targets: a function for every decoder of untrusted bytes, which returns whether it accepted them or raises a
bug.

A target knows which errors its decoder may raise, and checks the properties of what it accepts. The same targets
serve the tests (seeds, saved findings, random damage) and ``fuzz_campaign``, which searches by coverage.

- common: ``Target``, and what all targets use: a peer, its record, a link on which given bytes arrive;
- wire: frames, messages, payloads, codecs, addresses, join links, manifests;
- directory: the DHT's records, requests and answers; relays; libp2p certificates;
- admission: certificates, invites, access lists, receipts, and the gate before a conversation;
- services: requests to the small services, and their answers.
"""

from fuzz_targets import admission, directory, services, wire
from fuzz_targets.common import Target


def targets() -> dict[str, Target]:
    """Return all targets by name."""
    return {**wire.targets(), **directory.targets(), **admission.targets(), **services.targets()}


__all__ = ["Target", "targets"]
