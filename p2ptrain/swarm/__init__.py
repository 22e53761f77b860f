"""The protocol core: who exchanges what with whom, and what happens when they do not answer.

Events in, effects out, time and randomness as arguments. No tensor, no socket, no clock.

``docs/generated/MAP.md`` lists the modules; begin with ``messages``, ``events`` and ``rules``, then
``peer``, the entry point, and ``exchange``.

Three rules keep asynchronous mixing stable: a fragment is engaged from its snapshot until its displacement is
applied; crossing offers are settled by the smaller peer id; a newcomer pulls before it pushes. ``docs/PROTOCOL.md`` has
the tables.
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
