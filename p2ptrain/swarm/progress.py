"""What an exchange does to both sides' progress: averaged like the weights, and within what each side can bear. Pure.

Progress steers schedules and the run's end, and is a peer's word. So it is bounded what a partner may do to ours, in a
way that both sides compute alike: what one does not lose the other does not gain, or a fast peer among slow ones would
create progress that nobody trained for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import PeerState, Terms
from p2ptrain.swarm.rules import MAX_KNOWN, SwarmRules

RATE_SLACK = 16.0
"""Exchanges may raise our progress this many times as fast as our own training does. Progress is averaged, so
everyone's grows at the swarm's mean rate; a peer 16 times slower than that falls behind in its schedule. A guess."""

FALL_SLACK = 1.5
"""All our partners together may lower our progress so many times as fast as it grows, each by its part. Of n peers the
fastest must fall by (n - 1) / n of its own pace where the others stand still, by one n-th for each, if it meets all
alike; the half beside that is for chance. So L liars of n slow us by about 1.5 L / n, ..."""
FALL_STEPS = 1.0
"""... and at once by so many outer steps each. Drawn at random (tests/swarm/test_progress.py): one peer 2 to 20 times
as fast as 7 or 63 others led them by at most .3 more than without any bound. A liar that says for ever that it is at
the beginning, and calls 20 times as often as anybody, left 7 others .78 of their pace, and two left 6 others .57."""
LATELY_STEPS = 64.0
"""Whom we exchanged with within so many outer steps of progress is one of our partners. A guess: with one exchange a
step that is everybody in a small swarm, and a part of a large one."""


def progress_displacement(mine: Terms, theirs: Terms, fragments: int, rules: SwarmRules) -> float:
    """What an exchange adds to our progress (tokens per peer).

    Averaged like the weights, for the fragments exchanged; cut in the same proportion on both sides to what the one
    that is ahead lets itself be lowered by (``Terms.fall``), and to the catching-up bound. Who has come to the run's
    end moves no more, and lowers nobody.
    """
    if mine.state is PeerState.FINISHING:
        return 0.0
    weight = mine.weight_of(theirs)
    share = 2.0 / (1 + max(mine.partners, theirs.partners)) * min(fragments / rules.fragments, 1.0)
    apart = share * (theirs.progress - mine.progress) / (mine.weight + weight)
    ours, others = apart * weight, -apart * mine.weight
    falling, most = (ours, mine.fall) if ours < 0 else (others, theirs.fall)
    if falling == 0 or (ours < 0 and theirs.state is PeerState.FINISHING):  # the same number on both sides
        return 0.0
    return ours * min(1.0, rules.catch_up_tokens / max(abs(ours), abs(others)), most / abs(falling))


def left(progress: float, rules: SwarmRules) -> float:
    """What may still be added to ours (tokens per peer). What was agreed on is older than what we trained meanwhile,
    and whoever it lifted far beyond the run's end would be refused by all."""
    return max(rules.tokens_per_peer - progress, 0.0)


@dataclass(slots=True)
class ProgressAccount:
    """What a partner may do to our progress, in tokens, as of our last exchange with it."""

    held: float
    """It may lower us by so much."""
    since: float
    """``ProgressBudget.grown`` then."""
    net: float = 0.0
    """It has raised us by so much, what it lowered us by taken off."""
    highest: float = 0.0
    """The most that ``net`` ever was."""


@dataclass(slots=True)
class ProgressBudget:
    """How far exchanges may still move our progress: what keeps liars, however many, from ending our schedule, and few
    from holding it up.

    Upwards it is a bucket that holds one catching-up bound and fills at ``RATE_SLACK`` times what we train; what
    exceeds it is cut off on our side only. Downwards each partner has an account: it begins with ``FALL_STEPS`` outer
    steps, grows by the partner's part of ``FALL_SLACK`` times ``grown``, to that of ``LATELY_STEPS`` at most, and with
    what it raises us by itself. What it holds is what our terms say, and both sides keep to it.
    """

    capacity: float
    """Tokens; of the bucket."""
    step: float
    """Tokens of an outer step."""
    left: float = field(init=False)
    grown: float = 0.0
    """Tokens by which our training has raised our progress, and partners on balance. (Who passes on what a fast
    partner brings must fall by it; what equals raise each other by, they lower each other by.)"""
    last: float = 0.0
    """``grown`` when we last exchanged with anybody."""
    accounts: dict[PeerId, ProgressAccount] = field(default_factory=dict)
    """Of whom we exchanged with last at the end."""

    def __post_init__(self) -> None:
        self.left = self.capacity

    def trained(self, tokens: float) -> None:
        """We trained on so many more."""
        self.grown += tokens
        self.left = min(self.left + RATE_SLACK * tokens, self.capacity)

    def fall(self, peer: PeerId) -> float:
        """The most (tokens) that this partner may lower us by now."""
        return max(self._held(peer), 0.0)

    def take(self, displacement: float, peer: PeerId) -> float:
        """Account for what an exchange does; as much of it as the bucket allows."""
        taken = max(min(displacement, self.left), 0.0) if displacement > 0 else displacement
        self.left -= max(taken, 0.0)
        held, account = self._held(peer) + taken, self.accounts.pop(peer, None) or ProgressAccount(0.0, 0.0)
        account.net += taken
        if account.net > account.highest:
            self.grown += account.net - account.highest
            account.highest = account.net
        account.held, account.since = held, self.grown
        self.last = self.grown
        self.accounts[peer] = account
        if len(self.accounts) > MAX_KNOWN:
            del self.accounts[next(iter(self.accounts))]
        return taken

    def _held(self, peer: PeerId) -> float:
        account = self.accounts.get(peer)
        if account is None:  # a large swarm's peers seldom meet again
            alone = FALL_SLACK * min(self.grown - self.last, LATELY_STEPS * self.step / 2)
            return max(FALL_STEPS * self.step, alone)
        part = FALL_SLACK / max(sum(1 for _ in self._lately()) + 1, 2)
        most = max(account.held, part * LATELY_STEPS * self.step)  # who saves up for long must not lower us at one blow
        return min(account.held + part * (self.grown - account.since), most)

    def _lately(self) -> Iterator[PeerId]:
        """With whom we exchanged within ``LATELY_STEPS``."""
        for peer in reversed(self.accounts):
            if self.accounts[peer].since < self.grown - LATELY_STEPS * self.step:
                return
            yield peer
