"""Contributions to a run: which peer trained how many tokens, and how much sooner the run ends thanks to it. Pure.

Tokens and hours are what each peer says about itself. ``signed_tokens`` are those that partners signed in receipts
(``p2ptrain.receipts``). That proves an exchange with these partners, but nobody can count a peer's tokens from outside.

Anybody may have many keys that sign for each other, so what the page's own node saw comes first: the peers whose work
it saw grow most often keep their rows, and their tokens count first. Progress follows the peers that are here, in both
directions and no faster than a multiple of the measured speed, so a false claim does not outlast its peers for long.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.page.untrusted import MOST_NAME, number, words
from p2ptrain.receipts import Receipt

MOST_CONTRIBUTORS = 256
"""Maximum rows, as many as a page shows peers."""
MOST_TIMES = 2.0
"""Largest plausible tokens, in multiples of all peers' progress, which is an estimate; of one peer, and of all rows
together. Guess: measure the ratio of tokens to progress in peers that train alone, exchange, and train alone again."""
MOST_SPEED = 20.0
"""Largest plausible speed of all peers, in multiples of the measured one, as ``bootstrap.aggregates.MAX_TIMES``."""
OBSERVATION_S = 30.0
"""Shortest time between two observations of one peer, which is the mean time between two receipts."""
MOST_SIGNERS = 8
"""Maximum partners of one peer that are counted as signers: more prove no more, since one owner may have many keys."""
MOST_ID = 128
"""Maximum characters of a peer id, more than any has."""
MOST_TRAINED_S = 1e9
"""Maximum seconds of training: thirty years."""
GAP_S = 600.0
"""Longest time without progress that counts as training: longer than inner steps of slow computers. A longer one is a
pause, a sleep or a clock's jump."""
SHORTEST_S = 60.0
"""Shortest measured time that gives a speed, as in ``peer.speed``."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Work of one peer, present or departed. Numbers never fall: a peer may return with an older checkpoint."""

    peer: str
    nickname: str = ""
    tokens: int = 0
    """Tokens that it trained on, as it says."""
    trained_s: float | None = None
    """Seconds in which it trained, as it says; None: not reported."""
    signed_tokens: int = 0
    """Largest number of its tokens that a partner signed."""
    signers: tuple[str, ...] = ()
    """Ids of partners that signed, at most ``MOST_SIGNERS``."""
    last_at: float = 0.0
    """Time of its last report, in seconds since 1970."""
    observations: int = 0
    """Number of times that this node saw the peer's work grow: in its reports, or in receipts that this node signed."""
    observed_at: float = 0.0
    """Time of the last observation, or of the first report, in seconds since 1970."""
    is_own: bool = False
    """Whether this node is the peer, and so knows what it did."""


def sooner_s(run_tokens: float, tokens_per_s: float, share: float) -> float | None:
    """Return by how many seconds a run ends sooner thanks to a peer; None if that is unknown, or if it trains alone.

    ::

        with it      run_tokens / tokens_per_s
        without it   run_tokens / (tokens_per_s * (1 - share))

    The peer's mean speed over the run is its share of all peers' mean speed, with its pauses and absences.

    Args:
        tokens_per_s: mean speed of all peers together over the run so far.
        share: the peer's tokens divided by those of all peers so far.
    """
    if tokens_per_s <= 0 or not 0 <= share < 1:
        return None
    return run_tokens / (tokens_per_s * (1 - share)) - run_tokens / tokens_per_s


@dataclass(slots=True)
class ContributionTable:
    """Contributions of all peers that reported any, present and departed, and the measured speed of the run."""

    rows: dict[str, Contribution] = field(default_factory=dict)
    progress: float = 0.0
    """Tokens of all peers, as the peers that are here estimate them."""
    measured_tokens: float = 0.0
    """Part of the progress that was made while the speed was measured."""
    measured_s: float = 0.0
    """Seconds in which somebody trained and the speed was measured."""
    seen_at: float | None = None
    """Time when the progress last changed, in seconds since 1970; None: never."""

    def take(self, row: Contribution) -> None:
        """Take a peer's report. In a full table a new peer takes the place of the one that was observed least."""
        known = self.rows.get(row.peer)
        if known is None and len(self.rows) >= MOST_CONTRIBUTORS:
            least = min(self.rows.values(), key=lambda each: (each.is_own, each.observations, each.last_at))
            del self.rows[least.peer]
        self.rows[row.peer] = replace(row, observed_at=row.last_at) if known is None else _grown(known, row)

    def forget(self, peer: str) -> None:
        """Remove a peer whose owner does not share its figures any more."""
        self.rows.pop(peer, None)

    def observe(self, progress: float, at: float) -> None:
        """Follow the progress that the present peers estimate, at a time in seconds since 1970; measure their speed.

        Progress comes in steps, so the time without any belongs to the next step. A fall corrects what was too much, so
        it counts in the speed, too; below its beginning the measurement starts anew. While nobody was here, progress
        may have grown but not fallen.
        """
        if progress <= 0 or progress == self.progress:
            return
        if self.seen_at is None:
            self.progress, self.seen_at = progress, at
            return
        passed_s = max(at - self.seen_at, 0.0)
        is_measured = 0 < passed_s <= GAP_S
        most = MOST_SPEED * self.tokens_per_s * passed_s if self.tokens_per_s else math.inf
        least = -most if is_measured or not self.tokens_per_s else 0.0
        gained = min(max(progress - self.progress, least), most)
        self.progress, self.seen_at = self.progress + gained, at
        if is_measured or gained < 0:
            self.measured_tokens += gained
            self.measured_s += passed_s if is_measured else 0.0
        if self.measured_tokens < 0:
            self.measured_tokens = self.measured_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Mean speed of all peers together while they trained; None: not measured long enough."""
        return self.measured_tokens / self.measured_s if self.measured_s >= SHORTEST_S else None

    def document(self, run_tokens: int, here: Collection[str]) -> dict[str, Any]:
        """Return the rows, those with most tokens first, and the tokens of peers without a row.

        All rows together count for at most ``MOST_TIMES`` the progress; first those that this node observed most,
        and of equally observed ones those that claim less.

        Args:
            here: ids of the present peers.
        """
        speed = self.tokens_per_s
        found = self._within_progress()
        counted = sum(row.tokens for row in found)
        whole = max(self.progress, counted)
        rows = sorted(found, key=lambda row: (-row.tokens, row.peer))
        return {
            "rows": [
                {
                    "id": row.peer,
                    "nickname": row.nickname,
                    "here": row.peer in here,
                    "tokens": row.tokens,
                    "signed_tokens": row.signed_tokens,
                    "signers": len(row.signers),
                    "trained_s": row.trained_s,
                    "share": row.tokens / whole if whole else None,
                    "sooner_s": sooner_s(run_tokens, speed, row.tokens / whole) if speed and whole else None,
                    "last_at": row.last_at,
                }
                for row in rows
            ],
            "others_tokens": max(whole - counted, 0.0),
            "tokens_per_s": speed,
        }

    def _within_progress(self) -> list[Contribution]:
        left = int(MOST_TIMES * self.progress)
        if not left:
            return [*self.rows.values()]
        found = []
        for row in sorted(self.rows.values(), key=lambda each: (not each.is_own, -each.observations, each.tokens)):
            tokens = min(row.tokens, left)
            found.append(replace(row, tokens=tokens, signed_tokens=min(row.signed_tokens, tokens)))
            left -= tokens
        return found


def reported(
    run: RunId, peer: PeerId, told: Mapping[str, Any], nickname: str, progress: float, now: float
) -> Contribution | None:
    """Return the contribution that a peer reports to a bootstrap, and that partners signed; None if it reports none.

    Args:
        told: the peer's report. Older peers report ``tokens`` alone.
        progress: tokens of all peers so far.
    """
    tokens = int(min(number(told.get("contributed", told.get("tokens"))) or 0, MOST_TIMES * progress))
    if not tokens:
        return None
    row = Contribution(
        peer=words(peer, MOST_ID),
        nickname=words(nickname, MOST_NAME),
        tokens=tokens,
        trained_s=number(told.get("trained_s"), 0.0, MOST_TRAINED_S),
        last_at=now,
    )
    receipt = _receipt(run, peer, told.get("receipt"), now)
    if receipt is None:
        return row
    # A partner may sign a false claim, so a receipt counts no more than the report.
    return replace(row, signed_tokens=min(receipt.tokens, tokens), signers=(receipt.partner,))


def _receipt(run: RunId, peer: PeerId, body: object, now: float) -> Receipt | None:
    """Return a peer's receipt if a partner signed it, and if its times are possible."""
    if not isinstance(body, bytes):
        return None
    try:
        receipt = Receipt.decode(body)
    except RemoteError:
        return None
    is_whole = receipt.peer == peer != receipt.partner and receipt.is_timely(now)
    return receipt if is_whole and receipt.is_signed(run) else None


def _grown(known: Contribution, row: Contribution) -> Contribution:
    trained = [each for each in (known.trained_s, row.trained_s) if each is not None]
    is_observed = row.tokens > known.tokens and abs(row.last_at - known.observed_at) >= OBSERVATION_S
    return replace(
        row,
        nickname=row.nickname or known.nickname,
        tokens=max(known.tokens, row.tokens),
        trained_s=max(trained, default=None),
        signed_tokens=max(known.signed_tokens, row.signed_tokens),
        signers=tuple(dict.fromkeys([*known.signers, *row.signers]))[:MOST_SIGNERS],
        last_at=max(known.last_at, row.last_at),
        observations=known.observations + is_observed,
        observed_at=row.last_at if is_observed else known.observed_at,
    )
