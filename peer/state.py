"""A peer's state, for whoever looks: the notes that the terminal and the log get, folded into one view, and figures.

It listens to the event log; what is a number at a moment it asks for (``Sources``). The page, ``/status``, ``/metrics``
and a bootstrap that shows the swarm (``net.figures_service``) all read it. Safe from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import SignedManifest
from p2ptrain.net import address
from p2ptrain.page import (
    CheckpointRow,
    ExchangeRow,
    FailureRow,
    PeerRow,
    RunFacts,
    SampleText,
    View,
    paragraph,
    plain,
    words,
)
from p2ptrain.page.view import MOST_FAILURES
from p2ptrain.swarm import Presence
from peer.messages import line, without_places

FAILURES = frozenset(
    {
        "failed",
        "broke protocol",
        "clipped",
        "not saved",
        "not counted",
        "discarded",
        "unconfirmed",
        "no manifest",
        "no badge",
        "not admitted",
        "put out",
        "unreachable",
        "relay lost",
        "no relay",
        "wrong clock",
        "p2pd died",
        "torn checkpoint",
        "settings refused",
        "alone",
    }
)
"""Notes of what did not work, or not as it could."""
TOLD = frozenset(
    {"failed", "broke protocol", "clipped", "discarded", "unconfirmed", "relay lost", "alone", "p2pd died"}
)
"""Those that others are told of, where the owner shares figures: of exchanges and of the swarm, not of the owner's
computer, files, settings or network at home."""
MOST_SAMPLE_TOLD = 600
"""Characters of a text that others get to see."""
RECENT = 10
"""Exchanges over whose distances the disagreement that is shown is the median."""

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where figures of this moment come from; from any thread."""

    figures: Callable[[], Mapping[str, Any]]
    """``Record.figures``."""
    rates: Callable[[], tuple[float, float]]
    """Bytes a second sent and received, lately."""
    traffic: Callable[[], tuple[int, int]]
    """Bytes sent and received since it started."""


class StatusView:
    """See the module.

    Args:
        standing: one word for what the peer does, and why; also before there is a run, and from any thread.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        me: PeerId,
        nickname: str,
        standing: Callable[[], tuple[str, str]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._view = View("peer", me=me)
        self._nickname = nickname
        self._standing = standing
        self._wall = wall
        self._lock = threading.Lock()
        self._sources: Sources | None = None
        self._device: str | None = None
        self._distances: deque[float] = deque(maxlen=RECENT)
        self._tells: list[Tell] = []
        self._join: Callable[[], str] = str
        self._shares: Callable[[], bool] = lambda: False
        self._kept = 0
        """The serial of the last news that came while nothing was shared."""
        self._told: deque[tuple[int, float, str]] = deque(maxlen=MOST_FAILURES)
        """Failures that others may hear of: serial, time, line."""

    def shared_while(self, shares: Callable[[], bool]) -> None:
        """Tell others of what happens while ``shares()``, which the noting thread asks."""
        self._shares = shares

    def on_event(self, tell: Tell) -> None:
        """Call ``tell`` with every exchange and failure from now on, in the noting thread."""
        self._tells.append(tell)

    def run(self, signed: SignedManifest, parameters: int, join: Callable[[], str]) -> None:
        """What is trained, and the command by which others join, which is asked for whenever somebody looks."""
        manifest = signed.manifest
        with self._lock:
            self._view.run = RunFacts(
                name=manifest.run.name,
                id=signed.run_id,
                parameters=parameters,
                tokens_per_peer=manifest.run.tokens_per_peer,
                recipe=manifest.outer.recipe,
                codec=manifest.codec.name,
            )
            self._join = join

    def take(self, sources: Sources) -> None:
        """There are figures now."""
        self._sources = sources

    def hear(self, kind: str, fields: dict[str, Any]) -> None:
        """A note; ``telemetry.Listener``."""
        is_shared = self._shares()
        with self._lock:
            event = self._fold(kind, fields, self._wall())
            if not is_shared:
                self._kept = self._view.last_serial
        if event is not None:
            for tell in self._tells:
                tell(event)

    def meet(self, records: Sequence[Presence], relayed: Callable[[PeerId], bool]) -> None:
        """Who else is here, by their records; and what goes over our line. To be called again and again."""
        now = self._wall()
        rows = [row_of(each, now, relayed(each.peer)) for each in records]
        with self._lock:
            self._view.place([self._own_row(), *rows], total=len(rows) + 1, at=now)
            if self._sources is not None:
                self._view.traffic.add(now, *self._sources.rates())

    def document(self) -> dict[str, Any]:
        """What ``/status`` hands out."""
        now = self._wall()
        with self._lock:
            self._refresh()
            self._view.join = self._join()
            return self._view.document(now)

    def telling(self, serial: int) -> tuple[dict[str, Any], list[list[Any]]]:
        """Our row and our news since a serial number, for those who show the swarm.

        All news where that serial was never given out: it is another process's, which was us before. Nothing of what
        happened while nothing was shared.
        """
        with self._lock:
            self._refresh()
            view = self._view
            news: list[list[Any]] = [
                ["exchange", row.n, row.at, row.b, row.seconds, row.bytes, row.distance, row.path]
                for row in view.exchanges
            ]
            news += [["failure", *each] for each in self._told]
            news += [["checkpoint", row.n, row.at, row.step] for row in view.checkpoints]
            known = max(serial if serial <= view.last_serial else 0, self._kept)
            since = sorted((each for each in news if each[1] > known), key=lambda each: each[1])
            sample = {} if view.sample is None else {"sample": view.sample.text[:MOST_SAMPLE_TOLD]}
            return plain(self._own_row()) | sample, since

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _fold(self, kind: str, fields: Mapping[str, Any], now: float) -> dict[str, Any] | None:
        """Take a note in; what to tell those who follow, if anything."""
        view = self._view
        match kind:
            case "exchanged":
                return self._exchanged(fields, now)
            case "progress" if "loss" in fields:
                if (curve := view.curve(view.me, self._nickname)) is not None:
                    curve.train.add(float(fields["progress"]), now, float(fields["loss"]))
            case "started" | "held out" | "trained":
                self._device = str(fields.get("device", self._device or "")) or None
                if "progress" in fields and (curve := view.curve(view.me, self._nickname)) is not None:
                    curve.held_out.add(float(fields["progress"]), now, float(fields["loss"]))
            case "saved":
                view.add_checkpoint(CheckpointRow(view.next_serial(), now, view.me, int(self._figure("step"))))
            case "sample":
                view.sample = SampleText(now, view.me, int(fields["step"]), "", paragraph(str(fields["text"])))
            case _ if kind in FAILURES:
                said = line(kind, fields) or f"{kind}: {fields.get('why', '')}"
                row = FailureRow(view.next_serial(), now, view.me, words(said))
                view.add_failure(row)
                if kind in TOLD:
                    self._told.append((row.n, now, words(without_places(said))))
                return {"kind": "failure", **plain(row)}
        return None

    def _exchanged(self, fields: Mapping[str, Any], now: float) -> dict[str, Any]:
        view, distance = self._view, float(fields.get("distance", 0.0))
        row = ExchangeRow(
            n=view.next_serial(),
            at=now,
            a=view.me,
            b=str(fields["peer"]),
            seconds=float(fields.get("seconds", 0.0)),
            bytes=int(fields.get("sent_bytes", 0)) + int(fields.get("received_bytes", 0)),
            distance=distance,
            path="relayed" if fields.get("relay") else "direct",
        )
        view.add_exchange(row)
        self._distances.append(distance)
        view.disagreement.add(self._figure("progress"), now, median(self._distances))
        return {"kind": "exchange", **plain(row)}

    def _figure(self, name: str) -> float:
        return 0.0 if self._sources is None else float(self._sources.figures().get(name) or 0.0)

    def _own_row(self) -> PeerRow:
        view, sources = self._view, self._sources
        figures: Mapping[str, Any] = {} if sources is None else sources.figures()
        up, down = (None, None) if sources is None else sources.rates()
        sent, received = (None, None) if sources is None else sources.traffic()
        return PeerRow(
            id=view.me,
            nickname=self._nickname,
            state=view.state,
            step=int(figures.get("step", 0)),
            progress=float(figures.get("progress", 0.0)),
            path="here",
            device=self._device,
            tokens=figures.get("tokens"),
            tokens_per_s=figures.get("tokens_per_s"),
            loss=figures.get("loss"),
            held_out=figures.get("val_loss"),
            disagreement=median(self._distances) if self._distances else None,
            exchanges=figures.get("exchanges_ok"),
            failed=figures.get("exchanges_failed"),
            up=up,
            down=down,
            sent_bytes=sent,
            received_bytes=received,
            blocked_share=figures.get("blocked_share"),
        )

    def _refresh(self) -> None:
        """Figures of this moment."""
        view, sources = self._view, self._sources
        view.state, view.why = self._standing()
        if sources is None:
            return
        own = self._own_row()
        view.peers = {own.id: own, **{peer: row for peer, row in view.peers.items() if peer != own.id}}
        view.total_peers = max(view.total_peers, 1)
        figures = sources.figures()
        named = {
            "tokens": figures.get("tokens"),
            "tokens_per_s": figures.get("tokens_per_s"),
            "fraction": figures.get("fraction"),
            "blocked_share": own.blocked_share,
            "exchanges": figures.get("exchanges_ok"),
            "failed": figures.get("exchanges_failed"),
            "loss": own.loss,
            "held_out": own.held_out,
            "disagreement": own.disagreement,
            "up": own.up,
            "down": own.down,
            "sent_bytes": own.sent_bytes,
            "received_bytes": own.received_bytes,
        }
        view.figures = {name: float(value) for name, value in named.items() if value is not None}


def row_of(record: Presence, now: float, relayed: bool) -> PeerRow:
    """What a presence record says of a peer, as far as strangers' words go."""
    return PeerRow(
        id=record.peer,
        nickname=words(record.nickname, 32),
        state=record.state.value,
        step=record.step,
        progress=record.progress,
        age_s=max(now - record.issued_at, 0.0),
        path="relayed" if relayed else address.way_to(record.addresses),
    )
