"""One view of a peer's state, folded from the notes of the event log and from current figures.

``StatusView`` listens to the event log and reads current numbers from ``Sources``. The page, ``/status``, ``/metrics``
and bootstraps that show the swarm (``net.figures_service``) read it. Safe from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from p2ptrain.base.clock import wall
from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import SignedManifest
from p2ptrain.net import address
from p2ptrain.page.contributors import Contribution
from p2ptrain.page.memory import PageMemory
from p2ptrain.page.samples import SampleText
from p2ptrain.page.untrusted import paragraph, words
from p2ptrain.page.view import (
    MOST_FAILURES,
    PUNCHED,
    CheckpointRow,
    ExchangeRow,
    FailureRow,
    PeerRow,
    RunFacts,
    View,
    plain,
    row_of_record,
)
from p2ptrain.receipts import Receipt
from p2ptrain.swarm import Presence
from peer.messages import line, without_places

logger = logging.getLogger(__name__)

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
        "no certificate",
        "not admitted",
        "put out",
        "unreachable",
        "relay lost",
        "no relay",
        "wrong clock",
        "same identity",
        "narrow path",
        "p2pd died",
        "trainer died",
        "torn checkpoint",
        "settings refused",
        "not tracked",
        "alone",
    }
)
SHAREABLE = frozenset(
    {"failed", "broke protocol", "clipped", "discarded", "unconfirmed", "relay lost", "alone", "p2pd died"}
)
"""Kinds of failures shown to others if the owner shares figures: about exchanges and the swarm only, not about the
owner's computer, files, settings or home network."""
MAX_SAMPLE_SHARED = 600
"""Maximum characters of a sample text that others get."""
TIME_FIGURES = ("swarm_tokens_per_s", "remaining_s", "shortened_s")
"""Figures of all peers together, as this one estimates them (``peer.speed``)."""
RECENT = 10
"""Number of exchanges whose median distance is shown as the disagreement."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Functions that return current figures; each is safe from any thread."""

    figures: Callable[[], Mapping[str, Any]]
    rates: Callable[[], tuple[float, float]]
    """Bytes per second recently sent and received."""
    traffic: Callable[[], tuple[int, int]]
    """Bytes sent and received since the start."""
    foreign_tokens: int = 0
    """Tokens of the figures that an earlier identity trained."""


class StatusView:
    """A view of this peer, updated by notes; see the module docstring.

    Args:
        state: returns one word for what the peer does, and why; called from any thread, also before there is a run.
    """

    def __init__(
        self,
        me: PeerId,
        nickname: str,
        state: Callable[[], tuple[str, str]],
        wall: Callable[[], float] = wall,
    ) -> None:
        self._view = View("peer", me=me)
        self._nickname = nickname
        self._state = state
        self._wall = wall
        self._lock = threading.Lock()
        self._sources: Sources | None = None
        self._device: str | None = None
        self._distances: deque[float] = deque(maxlen=RECENT)
        self._join: Callable[[], str] = str
        self._shared_failures: deque[tuple[int, float, str]] = deque(maxlen=MOST_FAILURES)
        """Failures that others may see: serial, time, line."""
        self._receipt: Receipt | None = None
        self._memory = PageMemory()

    def set_run(self, signed: SignedManifest, parameters: int, join: Callable[[], str]) -> None:
        """Set the run, and the function that returns the join command, which every ``document`` calls."""
        manifest = signed.manifest
        with self._lock:
            self._view.run = RunFacts(
                name=manifest.run.name,
                id=signed.run_id,
                parameters=parameters,
                run_tokens=manifest.run.tokens,
                recipe=manifest.outer.recipe,
                codec=manifest.codec.name,
            )
            self._join = join

    def set_sources(self, sources: Sources) -> None:
        self._sources = sources

    def remember(self, memory: PageMemory) -> None:
        """Show what the home remembers, and save it at each new text and each checkpoint."""
        with self._lock:
            self._memory = memory
            self._view.samples, self._view.contributions = memory.samples, memory.contributions
            self._view.sample = memory.samples.texts[-1] if memory.samples.texts else None

    def contributed(self, receipt: Receipt | None, signed: Sequence[Receipt]) -> None:
        """Update contributions: this peer's by its newest receipt, those of partners by receipts that it signed."""
        with self._lock:
            self._receipt = receipt
            for each in signed:
                row = self._view.peers.get(each.peer)
                name = "" if row is None else row.nickname
                tokens = min(each.tokens, self._view.run.run_tokens)
                work = Contribution(each.peer, name, tokens, None, tokens, (self._view.me,), float(each.until))
                self._view.contributions.take(work)

    def on_note(self, kind: str, fields: dict[str, Any]) -> None:
        with self._lock:
            self._record(kind, fields, self._wall())

    def update_peers(self, records: Sequence[Presence], way_to: Callable[[PeerId], str]) -> None:
        """Update the live peers from their presence records, and the traffic curve. Call it periodically.

        Args:
            way_to: returns the path of the latest link with a peer; empty if its record tells enough.
        """
        now = self._wall()
        rows = [row_of_record(each, now, way_to(each.peer) or address.way_to(each.addresses)) for each in records]
        with self._lock:
            self._view.place([self._own_row(), *rows], total=len(rows) + 1, at=now)
            self._contribute(now)
            if self._sources is not None:
                self._view.traffic.add(now, *self._sources.rates())

    def document(self) -> dict[str, Any]:
        now = self._wall()
        with self._lock:
            self._refresh()
            self._view.join = self._join()
            return self._view.document(now)

    def momentary(self) -> tuple[int, dict[str, float]]:
        """Return this peer's outer step and the page's figures by name, with ``progress`` and ``peers``."""
        with self._lock:
            self._refresh()
            row = self._own_row()
            return row.step, self._view.figures | {"progress": row.progress, "peers": float(self._view.total_peers)}

    def report(self, serial: int) -> tuple[dict[str, Any], list[list[Any]]]:
        """Return our row and our news after a serial number, for bootstraps that show the swarm.

        Returns all news if that serial is from an earlier process of this peer.
        """
        with self._lock:
            self._refresh()
            view = self._view
            news: list[list[Any]] = [
                ["exchange", row.n, row.at, row.b, row.seconds, row.bytes, row.distance, row.path]
                for row in view.exchanges
            ]
            news += [["failure", *each] for each in self._shared_failures]
            news += [["checkpoint", row.n, row.at, row.step] for row in view.checkpoints]
            known = serial if serial <= view.last_serial else 0
            since = sorted((each for each in news if each[1] > known), key=lambda each: each[1])
            sample = {} if view.sample is None else {"sample": view.sample.text[:MAX_SAMPLE_SHARED]}
            return plain(self._own_row()) | sample | self._own_contribution(), since

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _record(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        view = self._view
        match kind:
            case "exchanged":
                self._exchanged(fields, now)
            case "progress" if "loss" in fields:
                if (curve := view.curve(view.me, self._nickname)) is not None:
                    curve.train.add(float(fields["progress"]), now, float(fields["loss"]))
            case "started" | "held out" | "final loss":
                self._device = str(fields.get("device", self._device or "")) or None
                if "progress" in fields and (curve := view.curve(view.me, self._nickname)) is not None:
                    curve.held_out.add(float(fields["progress"]), now, float(fields["loss"]))
            case "saved":
                view.add(CheckpointRow(view.next_serial(), now, view.me, int(self._figure("step"))))
                self._save()
            case "sample":
                tokens, text = fields.get("progress"), paragraph(str(fields["text"]))
                view.write(SampleText(now, view.me, int(fields["step"]), "", text, tokens))
                self._save()
            case _ if kind in FAILURES:
                text = line(kind, fields) or f"{kind}: {fields.get('why', '')}"
                row = FailureRow(view.next_serial(), now, view.me, words(text))
                view.add(row)
                if kind in SHAREABLE:
                    self._shared_failures.append((row.n, now, words(without_places(text))))

    def _exchanged(self, fields: Mapping[str, Any], now: float) -> None:
        view, distance = self._view, float(fields.get("distance", 0.0))
        row = ExchangeRow(
            n=view.next_serial(),
            at=now,
            a=view.me,
            b=str(fields["peer"]),
            seconds=float(fields.get("seconds", 0.0)),
            bytes=int(fields.get("sent_bytes", 0)) + int(fields.get("received_bytes", 0)),
            distance=distance,
            path="relayed" if fields.get("relay") else PUNCHED if fields.get("punched") else "direct",
        )
        view.add(row)
        self._distances.append(distance)
        view.disagreement.add(self._figure("progress"), now, median(self._distances))

    def _own_contribution(self) -> dict[str, Any]:
        """Return what this peer says that it did, and its newest receipt as evidence."""
        sources = self._sources
        if sources is None:
            return {}
        figures, receipt = sources.figures(), self._receipt
        told = {
            "contributed": max(int(figures.get("tokens") or 0) - sources.foreign_tokens, 0),
            "trained_s": figures.get("trained_s"),
        }
        return told if receipt is None else told | {"receipt": receipt.encode()}

    def _contribute(self, now: float) -> None:
        """Update this peer's own contribution and the measured speed of the run."""
        sources, table = self._sources, self._view.contributions
        told = self._own_contribution()
        if sources is None or not told["contributed"]:
            return
        receipt = self._receipt
        signed, signers = (0, ()) if receipt is None else (receipt.tokens, (receipt.partner,))
        row = Contribution(self._view.me, self._nickname, told["contributed"], told["trained_s"], signed, signers, now)
        table.take(replace(row, is_own=True))
        table.observe(self._figure("progress"), now)

    def _save(self) -> None:
        try:
            self._memory.save()
        except OSError as error:
            logger.warning("what the page remembers could not be saved: %s", error)

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
        view, sources = self._view, self._sources
        view.state, view.why = self._state()
        if sources is None:
            return
        own = self._own_row()
        view.peers = {own.id: own, **{peer: row for peer, row in view.peers.items() if peer != own.id}}
        view.total_peers = max(view.total_peers, 1)
        self._contribute(self._wall())
        figures = sources.figures()
        found = {name: figures.get(name) for name in ("fraction", *TIME_FIGURES)} | plain(own)
        view.figures = {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and name not in ("step", "progress", "age_s")
        }
