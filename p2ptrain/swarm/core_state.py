"""State shared by the parts of the protocol core: identity, position, known peers, and the effects collected so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from random import Random
from typing import Self

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.deadlines import Deadlines
from p2ptrain.swarm.events import Close, Counted, Effect, LinkFailed, Note, Open
from p2ptrain.swarm.matching import implausible_progress
from p2ptrain.swarm.membership import Membership
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.peer_count import PeerCount
from p2ptrain.swarm.peer_info import FailureKind
from p2ptrain.swarm.progress import ProgressBudget
from p2ptrain.swarm.rules import MAX_KNOWN, PASS_ON, YOUNG_STEPS, ProgressBounds, SwarmRules
from p2ptrain.swarm.trust import DistanceStats


@dataclass(slots=True)
class Counters:
    """Event counts since the start. Read by the terminal, the summary and the tests; written only by the core."""

    exchanges_ok: int = 0
    exchanges_failed: int = 0
    """Exchanges that ended without a commit after the partner had agreed."""
    half_commits: int = 0
    """Failed exchanges that the partner may have committed (two generals); each moves the swarm's mean by |dx| / n."""
    offers_unanswered: int = 0
    offers_withdrawn: int = 0
    """Offers that partners withdrew after this peer had accepted."""
    offers_declined: int = 0
    """Own offers that partners declined."""
    offers_refused: int = 0
    """Partners' offers that this peer declined."""
    solo_steps: int = 0
    """Outer steps after which nothing was committed before the next one ended."""
    outer_steps: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    pulls: int = 0
    donations: int = 0
    offences: int = 0
    clipped: int = 0
    """Exchanges with a distance above this peer's own radius."""

    @classmethod
    def of(cls, saved: Mapping[str, int]) -> Self:
        """Restore saved counters; those that another version did not save are 0."""
        return cls(**{each.name: int(saved.get(each.name, 0)) for each in fields(cls)})

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(slots=True)
class CoreState:
    me: PeerId
    rules: SwarmRules
    random: Random
    members: Membership
    step: int = 0
    progress: float = 0.0
    """Tokens of all peers: the trainer's progress and what committed exchanges will add to it."""
    unapplied: dict[LinkId, float] = field(default_factory=dict)
    """Progress (tokens) that each committed exchange adds and the trainer has not applied yet."""
    rate: float = 0.0
    """This peer's own tokens per second, 0 until an outer step is done."""
    seconds_per_outer_step: float = 0.0
    """Duration of this peer's own training per outer step, without waiting for partners; 0 until one is done."""
    settled: bool = False
    """Whether this peer has been in step with the swarm and has not dropped out since (``Peer``)."""
    was_in_step: bool = False
    """Whether this peer dropped out, so that its progress says about where the swarm was. A newcomer's says nothing."""
    unrelated_peers: set[PeerId] = field(default_factory=set)
    """Settled partners with unrelated weights since the last committed exchange."""
    is_counted: bool = False
    """Whether others' mean progress contains this peer's, which is its own: it began the run with nobody far ahead, and
    has not dropped out since."""
    overtakers: set[PeerId] = field(default_factory=set)
    """Partners far ahead with unrelated weights that this peer met in its first outer steps (``Judge``)."""
    implausible_claims: BoundedDict[PeerId, float] = field(default_factory=lambda: BoundedDict(MAX_KNOWN))
    """Largest implausible progress (tokens) by claiming peer."""
    outnumbered_since: float = inf
    """Time since which as many peers are implausibly far ahead as are beside us, kept until this peer is in step again;
    inf if fewer are."""
    is_outlier: bool = False
    """Whether all partners met lately had unrelated weights, so that this peer's weights are the outliers."""
    gives: bool = True
    keeps: frozenset[int] | None = None
    """Fragments that this peer holds as a keeper; None: it holds all and trains."""
    state: PeerState = PeerState.JOINING
    has_ended: bool = False
    """Whether this peer trained to the run's end. Its progress may fall below that in the final gossip."""
    is_over: bool = False
    """Whether the final gossip is over: this peer exchanges nothing more, and only gives its weights to newcomers."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    distance_stats: DistanceStats = field(default_factory=DistanceStats)
    counters: Counters = field(default_factory=Counters)
    effects: list[Effect] = field(default_factory=list)
    serial: int = 0
    count: PeerCount = field(default_factory=PeerCount)
    bounds: ProgressBounds = field(init=False)
    budget: ProgressBudget = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = ProgressBounds(self.rules)
        self.budget = ProgressBudget(self.bounds)

    @property
    def is_keeper(self) -> bool:
        return self.keeps is not None

    @property
    def held(self) -> frozenset[int]:
        """Fragments of the weights that this peer holds, or wants before it has any."""
        return self.rules.everything if self.keeps is None else self.keeps

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def note(self, kind: str, peer: PeerId | None = None, why: str = "", seconds: float = 0.0) -> None:
        self.emit(Note(kind=kind, peer=peer, why=why, seconds=seconds))

    def trained_to(self, progress: float) -> None:
        """Take over the trainer's progress, which lacks what is not applied yet."""
        self.progress = progress + sum(self.unapplied.values())

    def count_peers(self, now: float) -> None:
        """Count the peers that train, and pass a new number on to the trainer. Alone by choice, this peer is one."""
        if self.rules.exchanges and self.count.update(self.members, now, self.implausible_claims, not self.is_keeper):
            self.bounds = ProgressBounds(self.rules, self.count.peers)
            self.budget.rescale(self.bounds)
            self.emit(Counted(self.count.peers))
        for known in self.members.live(now):
            if known.state is PeerState.JOINING:  # it may have lost its weights
                known.counted_at = None
            elif known.state is PeerState.TRAINING and known.counted_at is None:
                known.counted_at = self.progress

    def counted_at(self, peer: PeerId) -> float:
        """Return our progress when we first counted this peer: our current one if we do not count it yet."""
        known = self.members.get(peer)
        return self.progress if known is None or known.counted_at is None else known.counted_at

    def adopted(self, step: int, progress: float, now: float) -> None:
        """Take over a donor's position. What peers trained since we first counted them remains as it is."""
        for known in self.members.live(now):
            if known.counted_at is not None:
                known.counted_at = max(known.counted_at + progress - self.progress, 0.0)
        self.step, self.progress = step, progress

    @property
    def state_for_partners(self) -> PeerState:
        """State that offers are answered with, so that partners stop counting on a peer whose final gossip is over."""
        return PeerState.LEAVING if self.is_over else self.state

    @property
    def told_progress(self) -> float:
        """Progress that others hear: after the final gossip at least the run's end, whatever its averages left.

        A newcomer that adopts these weights would otherwise train them on.
        """
        is_final = self.has_ended and (self.is_over or self.state is PeerState.LEAVING)
        return max(self.progress, self.rules.run_tokens) if is_final else self.progress

    @property
    def effective_progress(self) -> float:
        """Progress (tokens) of the weights that count: 0 if they are the outliers, or of a beginner left behind."""
        return 0.0 if self.is_outlier or self.overtakers else self.progress

    @property
    def is_young(self) -> bool:
        """Whether this peer began with the swarm and made so few outer steps that it loses little by taking weights."""
        return self.is_counted and self.counters.outer_steps < YOUNG_STEPS

    @property
    def takes_only_better(self) -> bool:
        """Whether a donor's weights must improve this peer's loss: it loses little without them, or nobody refused its
        own, and as many identities as it knows peers may only claim to be ahead."""
        return self.is_young or (self.outnumbered_since < inf and not self.is_outlier)

    def record_unrelated(self, peer: PeerId) -> None:
        if len(self.unrelated_peers) < MAX_KNOWN:
            self.unrelated_peers.add(peer)

    def record_claim(self, peer: PeerId, progress: float) -> None:
        """Remember a partner's progress claim if it is implausible."""
        if implausible_progress(progress, self.progress, self.settled, self.bounds):
            claimed = progress if progress >= 0 else inf  # NaN is not progress
            self.implausible_claims[peer] = max(self.implausible_claims.get(peer, 0.0), claimed)

    def trusts_progress(self, peer: PeerId) -> bool:
        """Report whether a partner's progress may raise ours.

        After an implausible claim only once this peer has come that far: it may have been left behind.
        """
        return self.implausible_claims.get(peer, 0.0) <= self.progress

    def record_related(self) -> None:
        """Record that some peer's weights are near ours, by an exchange or an adoption."""
        self.unrelated_peers.clear()
        self.is_outlier = False

    def drop_out(self) -> None:
        """Make this peer a newcomer again that knows where the swarm was."""
        self.settled, self.was_in_step, self.is_counted = False, True, False
        self.overtakers.clear()

    def drop_unused_links(self) -> None:
        opened = {effect.link for effect in self.effects if isinstance(effect, Open)}
        unused = opened & {effect.link for effect in self.effects if isinstance(effect, Close)}
        self.effects = [
            effect for effect in self.effects if not (isinstance(effect, Open | Close) and effect.link in unused)
        ]

    def record_failure(self, event: LinkFailed, failure: FailureKind, now: float, seconds: float = 0.0) -> None:
        """Record a failed conversation against its peer, and note it."""
        self.counters.offences += int(event.their_fault)
        self.members.record_failure(
            event.link.peer, now, FailureKind.OFFENCE if event.their_fault else failure, seconds
        )
        if failure is FailureKind.WITHDRAWN:
            self.note("skipped", event.link.peer, "it took back its offer, and we had accepted")
        else:
            self.note("broke protocol" if event.their_fault else "failed", event.link.peer, event.why, seconds)

    def new_link(self, peer: PeerId) -> LinkId:
        self.serial += 1
        return LinkId(peer=peer, serial=self.serial, outbound=True)

    def known_to_pass_on(self, now: float, to: PeerId) -> tuple[Presence, ...]:
        return self.members.sample(self.random, PASS_ON, now, excluding=to)
