"""The protocol core: pairing peers for exchanges, and handling failures.

Events go in and effects come out; time and randomness are arguments. The core holds no tensor, opens no socket and
reads no clock. A shell (``p2ptrain.net`` or ``p2ptrain.sim``) performs the effects. Modules, in reading order:

================  ===================================================================================
messages          messages between peers
events            events that a peer handles, and effects that it asks its shell to perform
rules             the run's parameters and the protocol's constants
transitions       transition tables, as data
peer_info         what is known of one other peer, and the pauses that its failures cause
membership        live peers and their behaviour
core_state        mutable state shared by the parts below
deadlines         deadlines, learnt from completed exchanges
offences          protocol violations by peer, and the resulting penalties
trust             bounds on the distance of a partner's weights, learnt from exchanges
progress          bounds on what exchanges change in a peer's progress
matching          whether to exchange, and how much (pure decisions)
partners          choice of partners, own terms, and pauses after a decline
topology          planned pairings of a recipe (pure)
exchange          state machine of one exchange, and the book of all exchanges
promises          commitments: planned partners that the trainer waits for
rounds            exchanges that both sides planned for one outer step
slow_partners     penalty for partners that hold an exchange too long
judging           weights that are not mixed, and the consequences for their sender
exchange_manager  offers, swaps and commits
claims            peers that claim to be far ahead, and which claims are corroborated
catchup           newcomers pull weights, and donors give them
download_plan     which donor to ask for which piece of a model, and which copies to accept (pure)
dropping_out      when a settled peer becomes a newcomer again
discovery         how a peer finds others and is found
final_gossip      exchanges after the end of training, until the swarm agrees
message_router    which part handles a message or a failed link
stopwatch         duration of this peer's own outer steps
peer              the only entry point, ``Peer.handle(event, now) -> effects``
presence_buckets  which DHT keys hold which peers; only shells use it, the core emits Announce and Lookup
================  ===================================================================================

Three rules keep asynchronous mixing stable: a fragment is engaged from its snapshot until its displacement is applied;
the smaller peer id wins when offers cross; a newcomer pulls before it exchanges. ``docs/PROTOCOL.md`` has the tables.
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
