"""Observable state of a peer, a bootstrap or a simulation as one plain document for the page and for Prometheus. Pure.

``View`` is bounded: lists keep their newest entries, curves are thinned evenly, and text from strangers is truncated
and made printable before it is stored. ``/status`` returns ``document`` (fields: docs/PAGE.md).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from p2ptrain.page.contributors import ContributionTable
from p2ptrain.page.figures import OF_PEERS
from p2ptrain.page.samples import SampleHistory, SampleText
from p2ptrain.page.untrusted import MOST_NAME, number, words
from p2ptrain.swarm import Presence

SCHEMA = 1
"""Version of the document. Readers refuse a newer one."""

MOST_PEERS = 256
"""Maximum rows of the table; with more peers it shows a sample and the total."""
MOST_GONE = 16
MOST_CURVES = 32
MOST_POINTS = 256
"""Maximum points of a curve: more than a screen resolves."""
MOST_EXCHANGES = 256
MOST_FAILURES = 64
MOST_CHECKPOINTS = 16

PUNCHED = "direct, through both routers"
"""Path between two peers that nobody can dial, made by hole punching."""

Kind = Literal["peer", "bootstrap", "simulation"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    name: str = ""
    id: str = ""
    parameters: int = 0
    run_tokens: int = 0
    """Tokens of all peers at the run's end."""
    recipe: str = ""
    codec: str = ""


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer as it reports itself; None: not reported."""

    id: str
    nickname: str = ""
    state: str = ""
    """State: joining, training, finishing or leaving; ``gone`` after its record expired."""
    step: int = 0
    progress: float = 0.0
    """Tokens of all peers, as this one estimates them."""
    age_s: float = 0.0
    """Time since its record was issued or since its last report, whichever is later."""
    path: str = ""
    """Reachability: direct, relayed, ``PUNCHED``, or dials out (cannot be reached, only dials others); empty:
    unknown."""
    device: str | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    """Recent training loss in nats per token."""
    held_out: float | None = None
    """Held-out loss in nats per token."""
    disagreement: float | None = None
    """Median of ||theirs - its|| / ||its|| before its last exchanges."""
    exchanges: int | None = None
    failed: int | None = None
    up: float | None = None
    """Recent bytes per second."""
    down: float | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    blocked_share: float | None = None
    """Share of its time that its trainer waited for exchanges."""


@dataclass(frozen=True, slots=True)
class ExchangeRow:
    n: int
    """Serial number, by which a reader finds new ones."""
    at: float
    """Seconds since 1970; simulated seconds in a simulation."""
    a: str
    b: str
    """Peer ids: the reporting peer and its partner."""
    seconds: float
    bytes: int
    """Bytes in both directions."""
    distance: float | None = None
    path: str = "direct"


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Failure, described in one line for people."""

    n: int
    at: float
    peer: str
    line: str


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    n: int
    at: float
    peer: str
    step: int


@dataclass(slots=True)
class Series:
    """Points over time, at most ``most``: beyond that every other one is dropped, but never the newest."""

    most: int = MOST_POINTS
    points: list[tuple[float, ...]] = field(default_factory=list)
    _stride: int = 1
    _since: int = 0
    """Points after the last permanent one; if there are any, the next point replaces the newest."""

    def add(self, *point: float) -> None:
        """Add a point; ignore it if a number is not finite."""
        if not all(map(math.isfinite, point)):
            return
        if self._since:
            self.points.pop()
        if len(self.points) == self.most:
            del self.points[1::2]
            self._since += self._stride * ((self.most - 1) % 2)  # with an even number the last one was dropped too
            self._stride *= 2
        self._since = (self._since + 1) % self._stride if self.points else 0
        self.points.append(point)


@dataclass(slots=True)
class Curve:
    """Learning curve of one peer: points of (tokens of all peers, seconds since 1970, nats per token)."""

    name: str = ""
    train: Series = field(default_factory=Series)
    held_out: Series = field(default_factory=Series)


@dataclass(slots=True)
class View:
    """Observable state. One thread at a time writes it and calls ``document``."""

    kind: Kind
    me: str = ""
    """Peer id of the observer; empty if it is not a peer."""
    run: RunFacts = field(default_factory=RunFacts)
    join: str = ""
    """Command by which others join; empty if there is none."""
    join_note: str = ""
    """Limits of the join command's reach, if any."""
    state: str = ""
    why: str = ""
    peers: dict[str, PeerRow] = field(default_factory=dict)
    total_peers: int = 0
    """Number of present peers, also if only a sample is shown."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """Curves by peer id; the empty id is the average of all peers."""
    disagreement: Series = field(default_factory=Series)
    """Points of (tokens of all peers, seconds since 1970, share)."""
    traffic: Series = field(default_factory=Series)
    """Points of (seconds since 1970, bytes per second sent, received)."""
    exchanges: deque[ExchangeRow] = field(default_factory=lambda: deque(maxlen=MOST_EXCHANGES))
    failures: deque[FailureRow] = field(default_factory=lambda: deque(maxlen=MOST_FAILURES))
    checkpoints: deque[CheckpointRow] = field(default_factory=lambda: deque(maxlen=MOST_CHECKPOINTS))
    sample: SampleText | None = None
    """Newest text of the model."""
    samples: SampleHistory = field(default_factory=SampleHistory)
    contributions: ContributionTable = field(default_factory=ContributionTable)
    public: str = ""
    """Path of the page that needs no token; empty: there is none."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures by name (``figures.OF_PEERS`` and ``OF_RUNS``): over all reporting peers; in a peer's view its own."""
    _serial: int = 0
    _issued: dict[str, float] = field(default_factory=dict)
    """Time of each peer's last sign of life, by peer id."""

    def add(self, row: ExchangeRow | FailureRow | CheckpointRow) -> None:
        """Add a row to its list. If the list is full, the peer with the most entries loses its oldest."""
        match row:
            case ExchangeRow():
                _append(self.exchanges, row, [each.a for each in self.exchanges])
            case FailureRow():
                _append(self.failures, row, [each.peer for each in self.failures])
            case CheckpointRow():
                _append(self.checkpoints, row, [each.peer for each in self.checkpoints])

    @property
    def last_serial(self) -> int:
        """Last serial number given out; 0 before the first."""
        return self._serial

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def place(self, rows: Iterable[PeerRow], total: int | None = None, at: float | None = None) -> None:
        """Replace the rows of present peers; of those without a row, keep the most recently departed as gone.

        Args:
            total: number of present peers, if the rows are a sample.
            at: time of the rows' ages; None: departed peers keep theirs.
        """
        before, self.peers = self.peers, {}
        for row in rows:
            if len(self.peers) < MOST_PEERS:
                self.peers[row.id] = row
        here = len(self.peers)
        gone = [row for peer, row in before.items() if peer not in self.peers]
        gone.sort(key=lambda row: row.state == "gone")  # recently departed first
        for row in gone[: min(MOST_GONE, MOST_PEERS - here)]:
            self.peers[row.id] = _gone(row)
        if at is not None:
            self._issued |= {row.id: at - row.age_s for row in self.peers.values() if row.state != "gone"}
        self._issued = {peer: issued for peer, issued in self._issued.items() if peer in self.peers}
        self.total_peers = here if total is None else max(total, here)
        for peer in [peer for peer in self.curves if peer and peer not in self.peers]:
            del self.curves[peer]

    def renew(self, row: PeerRow, at: float) -> None:
        self.peers[row.id] = row
        self._issued[row.id] = at - row.age_s

    def curve(self, peer: str, name: str = "") -> Curve | None:
        """Return a peer's curve to add to; None if there are enough. Curves of departed peers are replaced first."""
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
            "samples": [plain(each) for each in self.samples.texts],
            "contributions": self.contributions.document(self.run.run_tokens, self._here()),
            "public": self.public,
            "figures": {name: value for name, value in self.figures.items() if math.isfinite(value)},
        }

    def write(self, sample: SampleText) -> None:
        """Show a new text of the model, and keep it for comparisons."""
        self.sample = sample
        self.samples.add(sample)

    def _here(self) -> set[str]:
        return {row.id for row in self.peers.values() if row.state != "gone"}

    def _aged(self, row: PeerRow, at: float) -> PeerRow:
        """Return the row with its present age. Simulated peers and the observer itself do not age."""
        issued = self._issued.get(row.id)
        is_here = row.state != "gone" and (self.kind == "simulation" or row.id == self.me)
        return row if issued is None or is_here else replace(row, age_s=max(at - issued, 0.0))


_NOBODY = PeerRow("")


def _append(rows: deque[Any], row: object, tellers: Sequence[str]) -> None:
    if len(rows) == rows.maxlen:  # no peer hides the others
        [(loudest, _)] = Counter(tellers).most_common(1)
        del rows[tellers.index(loudest)]
    rows.append(row)


def _gone(row: PeerRow) -> PeerRow:
    return PeerRow(row.id, row.nickname, "gone", row.step, row.progress, row.age_s, row.path, row.device)


def plain(row: Any) -> dict[str, Any]:
    """Return a row's fields; numbers that are not finite become None."""
    found = {each.name: getattr(row, each.name) for each in fields(row)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }


def row_of_record(record: Presence, now: float, path: str) -> PeerRow:
    """Return a peer's row by its presence record, whose claims are unverified."""
    return PeerRow(
        id=record.peer,
        nickname=words(record.nickname, MOST_NAME),
        state=record.state.value,
        step=record.step,
        progress=record.progress,
        age_s=max(now - record.issued_at, 0.0),
        path=path,
    )


def row_of(peer: str, report: Mapping[str, Any], base: PeerRow, most_progress: float = math.inf) -> PeerRow:
    """Return a peer's row updated from its report (``plain`` of its own row, or anything else), each field checked.

    Args:
        most_progress: upper bound of a peer's progress, in tokens of all peers.
    """
    known: dict[str, Any] = {each.name: getattr(base, each.name) for each in fields(PeerRow)}
    for name, figure in OF_PEERS.items():
        found = number(report.get(name), 0.0, figure.most)
        known[name] = int(found) if figure.is_count and found is not None else found
    step, progress = number(report.get("step")), number(report.get("progress"))
    if step is not None and progress is not None and progress > base.progress:  # newer than the record's
        known["step"], known["progress"] = int(step), min(progress, most_progress)
    device = report.get("device")
    known["device"] = words(device, MOST_NAME) if isinstance(device, str) else None
    return PeerRow(**{**known, "id": peer})
