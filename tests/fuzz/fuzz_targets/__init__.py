"""Every decoder of what strangers send, as one function each: bytes in; out comes whether they were taken, or an error
that is a bug.

A target knows which errors its decoder may raise, and checks what must hold of whatever it lets pass. The same targets
serve the tests (seeds, saved findings, damage at random) and ``fuzz_campaign``, which searches by coverage.

common      ``Target``, and what all of them speak with: a peer, its record, a link on which given bytes arrive
wire        frames, messages, payloads, codecs, addresses, join links, manifests
directory   the DHT: records, requests, answers; relays; certificates
admission   badges, tickets, rulings, receipts, and the gate before a conversation
services    the small services: what they are asked, and what they answer
"""

from fuzz_targets import admission, directory, services, wire
from fuzz_targets.common import Target


def targets() -> dict[str, Target]:
    """By name."""
    return {**wire.targets(), **directory.targets(), **admission.targets(), **services.targets()}


__all__ = ["Target", "targets"]
