"""Contributions to a run: which peer trained how many tokens, and how much sooner the run ends thanks to it. Pure.

Tokens and hours are what each peer says about itself. ``signed_tokens`` are those that partners signed in receipts
(``p2ptrain.receipts``). That proves an exchange with these partners, but nobody can count a peer's tokens from outside.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from p2ptrain.page.untrusted import MOST_NAME, number, words

MOST_CONTRIBUTORS = 256
"""Maximum rows, as many as a page shows peers. Beyond that the row with the fewest signed, then claimed tokens goes."""
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
"""Shortest measured time that gives a speed, as in ``peer.time_left``."""


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

    @property
    def rank(self) -> tuple[int, int]:
        return self.signed_tokens, self.tokens


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
    """Tokens of all peers, the largest estimate so far."""
    measured_tokens: float = 0.0
    """Part of the progress that was made while the speed was measured."""
    measured_s: float = 0.0
    """Seconds in which somebody trained and the speed was measured."""
    _seen_at: float | None = None
    _seen_progress: float = 0.0

    def take(self, row: Contribution) -> None:
        """Take a peer's report. A new peer enters a full table only if it displaces one that did less."""
        known = self.rows.get(row.peer)
        if known is None and len(self.rows) >= MOST_CONTRIBUTORS:
            least = min(self.rows.values(), key=lambda each: (each.rank, each.last_at))
            if row.rank <= least.rank:
                return
            del self.rows[least.peer]
        self.rows[row.peer] = row if known is None else _grown(known, row)

    def forget(self, peer: str) -> None:
        """Remove a peer whose owner does not share its figures any more."""
        self.rows.pop(peer, None)

    def observe(self, progress: float, at: float) -> None:
        """Measure the speed of all peers, from the progress at a time in seconds since 1970.

        Progress comes in steps, so the time without any belongs to the next step.
        """
        before, gained = self._seen_at, progress - self._seen_progress
        if before is not None and not gained:
            return
        self._seen_at, self._seen_progress = at, progress
        self.progress = max(self.progress, progress)
        if before is not None and gained > 0 and 0 < at - before <= GAP_S:
            self.measured_tokens += gained
            self.measured_s += at - before

    @property
    def tokens_per_s(self) -> float | None:
        """Mean speed of all peers together while they trained; None: not measured long enough."""
        return self.measured_tokens / self.measured_s if self.measured_s >= SHORTEST_S else None

    def document(self, run_tokens: int, here: Collection[str]) -> dict[str, Any]:
        """Return the rows, those with most tokens first, and the tokens of peers without a row.

        Args:
            here: ids of the present peers.
        """
        speed = self.tokens_per_s
        counted = sum(row.tokens for row in self.rows.values())
        whole = max(self.progress, counted)
        rows = sorted(self.rows.values(), key=lambda row: (-row.tokens, row.peer))
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

    # --- on disk ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows.values()],
            "progress": self.progress,
            "measured_tokens": self.measured_tokens,
            "measured_s": self.measured_s,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Read the result of ``to_json``, each field checked; what is missing or out of bounds counts as 0."""
        table = cls()
        table.progress, table.measured_tokens, table.measured_s = (
            number(saved.get(name)) or 0.0 for name in ("progress", "measured_tokens", "measured_s")
        )
        rows = saved.get("rows")
        for entry in rows[:MOST_CONTRIBUTORS] if isinstance(rows, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("peer"), str):
                table.take(contribution(entry["peer"], entry, entry.get("nickname", "")))
        return table


def contribution(peer: str, told: Mapping[str, Any], nickname: object, most_tokens: float = 1e18) -> Contribution:
    """Return a contribution with each field checked.

    Args:
        told: fields of ``Contribution``, from anywhere.
        most_tokens: upper bound of the tokens: nobody trains more than all peers together.
    """
    signers = told.get("signers")
    return Contribution(
        peer=words(peer, MOST_ID),
        nickname=words(nickname, MOST_NAME),
        tokens=int(min(number(told.get("tokens")) or 0, most_tokens)),
        trained_s=number(told.get("trained_s"), 0.0, MOST_TRAINED_S),
        signed_tokens=int(min(number(told.get("signed_tokens")) or 0, most_tokens)),
        signers=tuple(words(each, MOST_ID) for each in signers[:MOST_SIGNERS])
        if isinstance(signers, list | tuple)
        else (),
        last_at=number(told.get("last_at")) or 0.0,
    )


def _grown(known: Contribution, row: Contribution) -> Contribution:
    trained = [each for each in (known.trained_s, row.trained_s) if each is not None]
    return replace(
        row,
        nickname=row.nickname or known.nickname,
        tokens=max(known.tokens, row.tokens),
        trained_s=max(trained, default=None),
        signed_tokens=max(known.signed_tokens, row.signed_tokens),
        signers=tuple(dict.fromkeys([*known.signers, *row.signers]))[:MOST_SIGNERS],
        last_at=max(known.last_at, row.last_at),
    )
