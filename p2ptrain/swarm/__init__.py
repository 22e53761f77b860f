"""The protocol core: pairing peers for exchanges, and handling failures.

Events go in and effects come out; time and randomness are arguments. The core holds no tensor, opens no socket and
reads no clock. A shell (``p2ptrain.net`` or ``sim``) performs the effects. ``docs/generated/MAP.md`` lists the
modules; begin with ``messages``, ``events`` and ``rules``, then ``peer``, the entry point, and ``exchange``.

Three rules keep asynchronous mixing stable: a fragment is in one exchange at a time, and each snapshot contains the
displacements committed before; the smaller peer id wins when offers cross; a newcomer pulls before it exchanges.
``docs/PROTOCOL.md`` has the tables.
"""

from p2ptrain.swarm.core_state import Counters
from p2ptrain.swarm.messages import DeclineReason, Offer, PeerState, Presence, Terms
from p2ptrain.swarm.peer import Peer
from p2ptrain.swarm.rules import PRESENCE_LIFETIME_S, SwarmRules

__all__ = [
    "PRESENCE_LIFETIME_S",
    "Counters",
    "DeclineReason",
    "Offer",
    "Peer",
    "PeerState",
    "Presence",
    "SwarmRules",
    "Terms",
]
