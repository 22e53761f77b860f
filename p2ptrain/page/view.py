"""What there is to see, as one plain document: a peer, a bootstrap and a simulation fill it; the page, Prometheus and
programs read it. Pure.

``View`` is the state, bounded whatever happens: lists keep their newest entries, curves are thinned out evenly, and
text from strangers is cut and made printable before it comes in. ``document`` is what ``/status`` hands out
(docs/PAGE.md has its fields).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from p2ptrain.page.untrusted import MOST_NAME, number, words

SCHEMA = 1
"""Of the document. Readers refuse a newer one."""

MOST_PEERS = 256
"""Rows of the table; of more peers a sample is shown, and how many there are."""
MOST_GONE = 16
"""Rows of peers that are gone."""
MOST_CURVES = 32
MOST_POINTS = 256
"""Of a curve: more than a screen shows apart."""
MOST_EXCHANGES = 256
MOST_FAILURES = 64
MOST_CHECKPOINTS = 16
MOST_SHOWN = 100.0
"""Of a loss in nats, and of a disagreement; what a stranger tells beyond it is nothing. No model starts near it."""

Kind = Literal["peer", "bootstrap", "simulation"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is trained."""

    name: str = ""
    id: str = ""
    parameters: int = 0
    tokens_per_peer: int = 0
    """The run's end."""
    recipe: str = ""
    codec: str = ""


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer, as far as it tells. None: it does not."""

    id: str
    nickname: str = ""
    state: str = ""
    """joining, training, finishing, leaving; ``gone`` when its record ran out."""
    step: int = 0
    """Outer steps."""
    progress: float = 0.0
    """Tokens per peer."""
    age_s: float = 0.0
    """Since its record was issued, or since it told of itself, if that was later."""
    path: str = ""
    """How others come to it: direct, relayed, dials out (nobody can; it calls others); empty: not known."""
    device: str | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    """Of training, lately, in nats a token."""
    held_out: float | None = None
    """On text that nobody trains on, in nats a token."""
    disagreement: float | None = None
    """||theirs - its|| / ||its|| before its last exchanges, the median."""
    exchanges: int | None = None
    failed: int | None = None
    up: float | None = None
    """Bytes a second, lately."""
    down: float | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    blocked_share: float | None = None
    """Of its time, in which its trainer waited for exchanges."""


@dataclass(frozen=True, slots=True)
class ExchangeRow:
    """One exchange that was made."""

    n: int
    """Serial, so that a reader tells what is new."""
    at: float
    """Seconds since 1970; of a simulation, simulated ones."""
    a: str
    b: str
    """Peer ids: who told of it, and its partner."""
    seconds: float
    bytes: int
    """Both ways."""
    distance: float | None = None
    path: str = "direct"


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Something that did not work, in a line for people."""

    n: int
    at: float
    peer: str
    """Who told of it."""
    line: str


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """Something was saved."""

    n: int
    at: float
    peer: str
    step: int


@dataclass(frozen=True, slots=True)
class SampleText:
    """What a model makes of a text just now."""

    at: float
    peer: str
    step: int
    prompt: str
    text: str


@dataclass(slots=True)
class Series:
    """Points over time, at most ``most`` of them: when there are more, every other one goes. The newest is there."""

    most: int = MOST_POINTS
    points: list[tuple[float, ...]] = field(default_factory=list)
    _stride: int = 1
    _since: int = 0
    """Points after the last one that stays; where there are any, the newest is replaced by the next."""

    def add(self, *point: float) -> None:
        """A point that is no number is no point."""
        if not all(map(math.isfinite, point)):
            return
        if self._since:
            self.points.pop()
        if len(self.points) == self.most:
            del self.points[1::2]
            self._since += self._stride * ((self.most - 1) % 2)  # of an even number the last one has gone, too
            self._stride *= 2
        self._since = (self._since + 1) % self._stride if self.points else 0
        self.points.append(point)


@dataclass(slots=True)
class Curve:
    """How one peer learns: points of (tokens per peer, seconds since 1970, nats a token)."""

    name: str = ""
    train: Series = field(default_factory=Series)
    held_out: Series = field(default_factory=Series)


@dataclass(slots=True)
class View:
    """Everything there is to see. One thread writes at a time; ``document`` is made by the writer's."""

    kind: Kind
    me: str = ""
    """Whose view it is, by peer id; empty: nobody's."""
    run: RunFacts = field(default_factory=RunFacts)
    join: str = ""
    """The command by which others join; empty where there is none."""
    join_note: str = ""
    """How far that reaches, where it is not everywhere."""
    state: str = ""
    why: str = ""
    peers: dict[str, PeerRow] = field(default_factory=dict)
    total_peers: int = 0
    """Those that are there, also where only a sample is shown."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """By peer id; an empty one: of everybody's average."""
    disagreement: Series = field(default_factory=Series)
    """(tokens per peer, seconds since 1970, share)."""
    traffic: Series = field(default_factory=Series)
    """(seconds since 1970, bytes a second sent, received)."""
    exchanges: deque[ExchangeRow] = field(default_factory=lambda: deque(maxlen=MOST_EXCHANGES))
    failures: deque[FailureRow] = field(default_factory=lambda: deque(maxlen=MOST_FAILURES))
    checkpoints: deque[CheckpointRow] = field(default_factory=lambda: deque(maxlen=MOST_CHECKPOINTS))
    sample: SampleText | None = None
    figures: dict[str, float] = field(default_factory=dict)
    """By name, of all who tell (in a peer's view its own): tokens, tokens_per_s, fraction, exchanges, failed, up, down,
    sent_bytes, received_bytes, blocked_share, loss, held_out, disagreement."""
    _serial: int = 0
    _issued: dict[str, float] = field(default_factory=dict)
    """By peer id: when it gave its last sign of life."""

    def add_failure(self, row: FailureRow) -> None:
        """Something did not work. Where there are too many failures, one of whoever told most makes room."""
        _make_room(self.failures, [each.peer for each in self.failures])
        self.failures.append(row)

    def add_exchange(self, row: ExchangeRow) -> None:
        """An exchange was made; room is made likewise."""
        _make_room(self.exchanges, [each.a for each in self.exchanges])
        self.exchanges.append(row)

    def add_checkpoint(self, row: CheckpointRow) -> None:
        """A checkpoint was saved; room is made likewise."""
        _make_room(self.checkpoints, [each.peer for each in self.checkpoints])
        self.checkpoints.append(row)

    @property
    def last_serial(self) -> int:
        """0 before the first one."""
        return self._serial

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def place(self, rows: Iterable[PeerRow], total: int | None = None, at: float | None = None) -> None:
        """Who is here now. Of those of whom no row comes, the last to go stay, as gone.

        Args:
            total: how many are here, where the rows are a sample.
            at: the time of the rows' ages; None: those who go keep theirs.
        """
        before, self.peers = self.peers, {}
        for row in rows:
            if len(self.peers) < MOST_PEERS:
                self.peers[row.id] = row
        here = len(self.peers)
        gone = [row for peer, row in before.items() if peer not in self.peers]
        gone.sort(key=lambda row: row.state == "gone")  # who went just now comes first
        for row in gone[: min(MOST_GONE, MOST_PEERS - here)]:
            self.peers[row.id] = _gone(row)
        if at is not None:
            self._issued |= {row.id: at - row.age_s for row in self.peers.values() if row.state != "gone"}
        self._issued = {peer: issued for peer, issued in self._issued.items() if peer in self.peers}
        self.total_peers = here if total is None else max(total, here)
        for peer in [peer for peer in self.curves if peer and peer not in self.peers]:
            del self.curves[peer]

    def renew(self, row: PeerRow, at: float) -> None:
        """Somebody who is here already told more of itself."""
        self.peers[row.id] = row
        self._issued[row.id] = at - row.age_s

    def curve(self, peer: str, name: str = "") -> Curve | None:
        """A peer's curve, to add to; None where there are enough. Those of peers who are gone make room."""
        if peer not in self.curves:
            gone = [each for each in self.curves if each and self.peers.get(each, _NOBODY).state == "gone"]
            if len(self.curves) >= MOST_CURVES and gone:
                del self.curves[gone[-1]]
            if len(self.curves) >= MOST_CURVES:
                return None
            self.curves[peer] = Curve()
        if name:
            self.curves[peer].name = words(name, MOST_NAME)
        return self.curves[peer]

    def document(self, at: float) -> dict[str, Any]:
        """Everything, in plain values that JSON has."""
        return {
            "schema": SCHEMA,
            "at": at,
            "kind": self.kind,
            "me": self.me,
            "run": asdict(self.run),
            "join": self.join,
            "join_note": self.join_note,
            "state": self.state,
            "why": self.why,
            "total_peers": self.total_peers,
            "peers": [plain(self._aged(row, at)) for row in self.peers.values()],
            "curves": [
                {"peer": peer, "name": each.name, "train": [*each.train.points], "held_out": [*each.held_out.points]}
                for peer, each in self.curves.items()
            ],
            "disagreement": [*self.disagreement.points],
            "traffic": [*self.traffic.points],
            "exchanges": [plain(row) for row in self.exchanges],
            "failures": [plain(row) for row in self.failures],
            "checkpoints": [plain(row) for row in self.checkpoints],
            "sample": None if self.sample is None else plain(self.sample),
            "figures": {name: value for name, value in self.figures.items() if math.isfinite(value)},
        }

    def _aged(self, row: PeerRow, at: float) -> PeerRow:
        """A row is older with every look, also while nothing new is found. Who is simulated, or oneself, is here."""
        issued = self._issued.get(row.id)
        is_here = row.state != "gone" and (self.kind == "simulation" or row.id == self.me)
        return row if issued is None or is_here else replace(row, age_s=max(at - issued, 0.0))


_NOBODY = PeerRow("")


def _make_room(rows: deque[Any], tellers: Sequence[str]) -> None:
    """So that nobody who talks much hides what others tell: the oldest of whoever told most goes."""
    if len(rows) == rows.maxlen:
        [(loudest, _)] = Counter(tellers).most_common(1)
        del rows[tellers.index(loudest)]


def _gone(row: PeerRow) -> PeerRow:
    return PeerRow(row.id, row.nickname, "gone", row.step, row.progress, row.age_s, row.path, row.device)


def plain(row: Any) -> dict[str, Any]:
    """A row's fields; numbers that are none become None."""
    found = {each.name: getattr(row, each.name) for each in fields(row)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }


def row_of(peer: str, told: Mapping[str, Any], base: PeerRow, most_progress: float = math.inf) -> PeerRow:
    """A peer's row with what it tells of itself (``plain`` of its own row, or anything else), each field checked.

    Args:
        most_progress: no peer can be further, in tokens per peer.
    """
    known: dict[str, Any] = {each.name: getattr(base, each.name) for each in fields(PeerRow)}
    for name in ("tokens_per_s", "up", "down"):
        known[name] = number(told.get(name))
    for name in ("loss", "held_out", "disagreement"):
        known[name] = number(told.get(name), 0.0, MOST_SHOWN)
    known["blocked_share"] = number(told.get("blocked_share"), 0.0, 1.0)
    for name in ("tokens", "exchanges", "failed", "sent_bytes", "received_bytes"):
        found = number(told.get(name))
        known[name] = None if found is None else int(found)
    step, progress = number(told.get("step")), number(told.get("progress"))
    if step is not None and progress is not None and progress > base.progress:  # newer than its record's
        known["step"], known["progress"] = int(step), min(progress, most_progress)
    device = told.get("device")
    known["device"] = words(device, MOST_NAME) if isinstance(device, str) else None
    return PeerRow(**{**known, "id": peer})
