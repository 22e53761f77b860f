"""The protocol core: who exchanges what with whom, and what happens when they do not answer.

Events in, effects out, time and randomness as arguments. No tensor, no socket, no clock. In reading order:

=============  ======================================================================================
messages       what peers say to each other
events         what can happen to a peer, and what it can ask its shell to do
rules          the numbers
membership     who is here and how they behaved
deadlines      how long to wait, learnt from completed exchanges
offences       who broke the rules how often, and until when it is left alone for it
trust          how far a partner's weights may lie from ours, learnt from exchanges
matching       whether to exchange, and how much it moves (pure decisions)
partners       whom to call, on which terms, and when again
topology       who mixes with whom where a recipe plans it (pure)
exchange       one exchange as a table of states, and the book of all
rounds         the exchanges that both sides planned for one outer step
promises       whose word our trainer still waits for in them
judging        whose weights are not mixed, and who is left alone for them
exchanging     offers, swaps, commits
catchup        newcomers pull weights, donors give them
claims         who says that it is far ahead, and whom of those we believe
pieces         which piece of a model to ask of which donor, and whom to believe (pure)
discovery      how one peer finds others and is found
final_gossip   exchanges after the trainer's end, until the swarm agrees
conversation   which of these a message or a failed link belongs to
peer           ``Peer.handle(event, now) -> effects``: the door
buckets        which keys of the directory hold whom; for the shells, the core asks no more than Announce and Lookup
=============  ======================================================================================

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
