"""Progress in an exchange: averaged like the weights, within bounds that each side can accept. Pure.

Invariant: the sum of all n peers' progress is n times the tokens that all have trained. Training keeps it, because each
peer adds n times its own tokens (``peer_count``); an exchange keeps it, because one side loses what the other gains. A
newcomer raises n, so it must add what the others had when they began to count it (``entry_progress``).

Progress drives schedules and the run's end, and is only a peer's claim. So a partner's influence on it is bounded, and
both sides compute the bound alike. Otherwise a fast peer among slow ones would create progress that nobody trained for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import PeerState, Terms
from p2ptrain.swarm.rules import MAX_KNOWN, ProgressBounds, SwarmRules

RATE_SLACK = 16.0
"""Maximum rate at which exchanges raise our progress, as a multiple of our own training. Progress is averaged and grows
at the swarm's mean rate, so a peer 16 times slower than the mean falls behind in its schedule. Guess: measure the
throughput ratios of one swarm."""

FALL_SLACK = 1.5
"""Maximum rate at which all partners together lower our progress, as a multiple of its growth, shared among them. The
fastest of n peers must fall by (n - 1) / n of its own rate if the others stand still, by 1 / n for each if it meets all
equally often; the extra half allows for chance. So L adversarial peers of n slow us by about 1.5 L / n."""
FALL_STEPS = 1.0
"""Outer steps by which each partner may lower our progress at once. Drawn at random (tests/swarm/test_progress.py): one
peer 2 to 20 times as fast as 7 or 63 others led them by at most .3 more than without a bound. An adversarial peer that
always claims to be at the beginning and calls 20 times as often as others left 7 others .78 of their rate; two left 6
others .57."""
LATELY_STEPS = 64.0
"""Outer steps of progress within which a peer counts as a recent partner. With one exchange a step that is everybody in
a small swarm, and a part of a large one. A sixteenth of a short run stops two of eight adversarial peers that stay at
the beginning, but keeps honest peers of uneven speeds apart (docs/LOG.md). Guess: vary it in simulated swarms with
adversarial peers."""


def entry_progress(counted_at: float, trained: float, theirs: float) -> float:
    """Return the progress with which a peer that was never settled takes the weights of one that has ``theirs``.

    Args:
        counted_at: the other peer's progress when it first counted this one. Any claim has an effect between keeping
            one's own progress and taking over the other's.
        trained: this peer's own progress, all of which it trained itself, for as many peers as it counted.
    """
    return max(trained, min(counted_at + trained, theirs))


def progress_displacement(mine: Terms, theirs: Terms, fragments: int, rules: SwarmRules) -> float:
    """Return the change of our progress by an exchange (tokens of all peers).

    It is averaged with equal weights by the share of exchanged fragments, so its sum over all peers is conserved. Both
    sides cut it alike: the side ahead falls by at most its ``max_decrease``, the side behind gains at most its
    ``max_increase``. If the side behind was never settled, it begins at least where the other was when it first counted
    it. A peer at the run's end keeps its progress and does not lower others'.
    """
    if mine.state is PeerState.FINISHING or PeerState.KEEPING in (mine.state, theirs.state):
        return 0.0  # a keeper moves nobody, and takes its progress elsewhere (``keeping.KeeperPosition``)
    ahead, behind = (theirs, mine) if theirs.progress > mine.progress else (mine, theirs)
    if behind.state is PeerState.FINISHING:
        return 0.0
    start = behind.progress
    if not behind.settled:
        start = max(start, min(ahead.counted_at, ahead.progress))
    share = min(fragments / rules.fragments, 1.0) / (1 + max(mine.partners, theirs.partners))
    moved = min(share * (ahead.progress - start), ahead.max_decrease, behind.max_increase)
    return start - mine.progress + moved if mine is behind else -moved


@dataclass(slots=True)
class ProgressAccount:
    """Tokens by which a partner may change our progress, as of our last exchange with it."""

    held: float
    """Tokens by which it may lower our progress."""
    since: float
    """``ProgressBudget.grown`` at that time."""
    net: float = 0.0
    """Tokens by which it has raised our progress, less those by which it lowered it."""
    highest: float = 0.0


@dataclass(slots=True)
class ProgressBudget:
    """Bounds on how exchanges move our progress.

    Adversarial peers, however many, cannot end our schedule, and few of them cannot delay it. Upwards the bound is a
    token bucket that fills at ``RATE_SLACK`` times our training. It holds one catching-up bound, or as much as flowed
    in since our last exchange: one that outlasts many outer steps must close the gap that grew meanwhile.
    Downwards each partner has an account that begins with ``FALL_STEPS`` outer steps, grows by the partner's part of
    ``FALL_SLACK`` times ``grown``, up to that of ``LATELY_STEPS``, and by what the partner raises us. Our terms state
    both balances, and both sides respect them; what exceeds the bucket at the commit is cut off on our side only.
    """

    bounds: ProgressBounds
    left: float = field(init=False)
    """Tokens in the bucket."""
    grown: float = 0.0
    """Tokens by which our training and, on balance, partners have raised our progress. (A peer that passes on what a
    fast partner brings must fall by it; equal partners raise and lower each other alike.)"""
    last: float = 0.0
    """``grown`` when we last exchanged with anybody."""
    lent: float = 0.0
    """Tokens for which the bucket was filled while an outer step was late."""
    accounts: BoundedDict[PeerId, ProgressAccount] = field(default_factory=lambda: BoundedDict(MAX_KNOWN))
    """Accounts by partner; the last one exchanged with comes last."""

    def __post_init__(self) -> None:
        self.left = self.bounds.catch_up

    def rescale(self, bounds: ProgressBounds) -> None:
        """Use the bounds of another number of peers. The bucket stays as full as it is."""
        self.left *= bounds.peers / self.bounds.peers
        self.bounds = bounds

    def trained(self, tokens: float) -> None:
        """Account for own training that added ``tokens`` to our progress."""
        self.grown += tokens
        self.lent = 0.0
        self._fill(tokens)

    def expected(self, tokens: float) -> None:
        """Fill the bucket as our usual speed would, while an outer step is late: partners still carry us along.

        Otherwise they would lose what a peer whose trainer has died cannot take, and the run would read too much.

        Args:
            tokens: what our training adds to our progress in the time since the last outer step.
        """
        late = tokens - self.bounds.step
        if late > self.lent:
            self._fill(late - self.lent)
            self.lent = late

    def _fill(self, tokens: float) -> None:
        most = max(self.bounds.catch_up, RATE_SLACK * (self.grown - self.last))
        self.left = min(self.left + RATE_SLACK * tokens, most)

    @property
    def max_increase(self) -> float:
        """Maximum (tokens) by which an exchange that begins now may raise us. The bucket fills until it commits."""
        return max(self.left, self.bounds.catch_up)

    def max_decrease(self, peer: PeerId) -> float:
        """Return the maximum (tokens) by which this partner may lower us now."""
        return max(self._held(peer), 0.0)

    def take(self, displacement: float, peer: PeerId) -> float:
        """Account for an exchange's displacement; return what the bucket allows of it."""
        taken = max(min(displacement, self.left), 0.0) if displacement > 0 else displacement
        self.left -= max(taken, 0.0)
        held, account = self._held(peer) + taken, self.accounts.get(peer) or ProgressAccount(0.0, 0.0)
        account.net += taken
        if account.net > account.highest:
            self.grown += account.net - account.highest
            account.highest = account.net
        account.held, account.since = held, self.grown
        self.last = self.grown
        self.accounts[peer] = account
        return taken

    def _held(self, peer: PeerId) -> float:
        account = self.accounts.get(peer)
        if account is None:  # a large swarm's peers seldom meet again
            alone = FALL_SLACK * min(self.grown - self.last, LATELY_STEPS * self.bounds.step / 2)
            return max(FALL_STEPS * self.bounds.step, alone)
        part = FALL_SLACK / max(sum(1 for _ in self._lately()) + 1, 2)
        most = max(
            account.held, part * LATELY_STEPS * self.bounds.step
        )  # a large balance must not lower us all at once
        return min(account.held + part * (self.grown - account.since), most)

    def _lately(self) -> Iterator[PeerId]:
        """Yield partners that we exchanged with within ``LATELY_STEPS``."""
        for peer in reversed(self.accounts):
            if self.accounts[peer].since < self.grown - LATELY_STEPS * self.bounds.step:
                return
            yield peer
