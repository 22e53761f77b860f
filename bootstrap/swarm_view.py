"""The swarm as a bootstrap sees it: presence records, and what peers whose owners agreed tell of themselves.

All of it is strangers' word, checked for shape and bounds (``p2ptrain.page``), shown to people and used for nothing.
Safe from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from p2ptrain.errors import NetworkError, RemoteError
from p2ptrain.ids import PeerId
from p2ptrain.manifest import SignedManifest, parameter_count
from p2ptrain.net import address
from p2ptrain.net.figures_service import FIGURES_PROTOCOL, LIMITS, ask_figures
from p2ptrain.net.links import P2PTransport
from p2ptrain.net.node import Node
from p2ptrain.page import (
    CheckpointRow,
    ExchangeRow,
    FailureRow,
    PeerRow,
    RunFacts,
    SampleText,
    View,
    number,
    paragraph,
    plain,
    row_of,
    words,
)
from p2ptrain.swarm import Presence

POLL_S = 3.0
"""Between two rounds of questions. A guess: the gossip that is shown is so old at most."""
MOST_ASKED = 64
"""Peers in one round: of more, a sample. What they may answer is bounded (``figures_service``): 2 MB a round."""
AT_ONCE = 8
KEPT_S = 60.0
"""Who keeps its figures, or does not answer, is asked again after so long."""

Tell = Callable[[dict[str, Any]], None]


class SwarmView:
    """See the module."""

    def __init__(self, signed: SignedManifest, wall: Callable[[], float] = time.time) -> None:
        manifest = signed.manifest
        self._view = View("bootstrap", state="serving")
        self._view.run = RunFacts(
            name=manifest.run.name,
            id=signed.run_id,
            parameters=parameter_count(manifest.model),
            tokens_per_peer=manifest.run.tokens_per_peer,
            recipe=manifest.outer.recipe,
            codec=manifest.codec.name,
        )
        self._is_open = manifest.admission.policy == "open"
        self._wall = wall
        self._lock = threading.Lock()
        self._told: dict[str, Mapping[str, Any]] = {}
        """What peers that are here told last."""
        self._serials: dict[str, int] = {}
        self._places: dict[PeerId, tuple[str, ...]] = {}
        self._not_before: dict[PeerId, float] = {}
        self._tells: list[Tell] = []

    def on_event(self, tell: Tell) -> None:
        """Call ``tell`` with every exchange from now on."""
        self._tells.append(tell)

    def join(self, command: str) -> None:
        """How others join."""
        self._view.join = command if self._is_open else ""

    def failed(self, text: str) -> None:
        """Something of our own did not work."""
        with self._lock:
            self._view.failures.append(FailureRow(self._view.next_serial(), self._wall(), "", words(text)))

    def meet(self, records: Iterable[Presence], total: int | None) -> None:
        """Who is here now."""
        now = self._wall()
        with self._lock:
            rows = [self._row(each, now) for each in records]
            self._places = {PeerId(row.id): place for row, place in rows}
            self._view.place([row for row, _ in rows], total, now)
            here = self._view.peers.keys()
            self._told = {peer: told for peer, told in self._told.items() if peer in here}
            self._serials = {peer: serial for peer, serial in self._serials.items() if peer in here}
            self._sum_up(now)

    def told(self, peer: PeerId, row: Mapping[str, Any], news: Sequence[Any]) -> None:
        """A peer told of itself."""
        now, events = self._wall(), list[dict[str, Any]]()
        with self._lock:
            if peer not in self._places:
                return  # it has left meanwhile
            self._told[peer] = row
            known = self._view.peers.get(peer)
            if known is not None:
                self._view.peers[peer] = known = row_of(peer, row, known)
                self._draw(known, now)
                if isinstance(text := row.get("sample"), str):
                    self._view.sample = SampleText(now, peer, known.step, "", paragraph(text))
            for each in news:
                events += self._news(peer, each)
        for tell in self._tells:
            for event in events:
                tell(event)

    def document(self) -> dict[str, Any]:
        """What ``/status`` hands out."""
        with self._lock:
            return self._view.document(self._wall())

    async def ask(self, node: Node, random: Random) -> None:
        """Ask peers for their figures, for ever. Survives NetworkError and RemoteError."""
        loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)
        transport = P2PTransport(node, FIGURES_PROTOCOL, LIMITS)

        async def one(peer: PeerId, places: Sequence[str]) -> None:
            async with gate:
                answer = None
                with contextlib.suppress(NetworkError, RemoteError):
                    answer = await ask_figures(transport, peer, places, self._serials.get(peer, 0))
                if answer is None:
                    self._not_before[peer] = loop.time() + KEPT_S
                else:
                    self.told(peer, *answer)

        while True:
            now = loop.time()
            self._not_before = {peer: until for peer, until in self._not_before.items() if until > now}
            due = [each for each in self._places.items() if each[0] not in self._not_before]
            await asyncio.gather(*(one(*each) for each in random.sample(due, min(len(due), MOST_ASKED))))
            await asyncio.sleep(POLL_S)

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _row(self, record: Presence, now: float) -> tuple[PeerRow, tuple[str, ...]]:
        through_relays = all(address.relay_of(each) is not None for each in record.addresses)
        base = PeerRow(
            id=record.peer,
            nickname=words(record.nickname, 32),
            state=record.state.value,
            step=record.step,
            progress=record.progress,
            age_s=max(now - record.issued_at, 0.0),
            path="relayed" if record.addresses and through_relays else "direct",
        )
        told = self._told.get(record.peer)
        return (base if told is None else row_of(record.peer, told, base)), record.addresses

    def _draw(self, row: PeerRow, now: float) -> None:
        """Its curves go on."""
        curve = self._view.curve(row.id, row.nickname)
        if curve is None:
            return
        if row.loss is not None:
            curve.train.add(row.progress, now, row.loss)
        if row.held_out is not None and (not curve.held_out.points or curve.held_out.points[-1][2] != row.held_out):
            curve.held_out.add(row.progress, now, row.held_out)

    def _news(self, peer: PeerId, told: Any) -> list[dict[str, Any]]:
        """Take in one thing that a peer tells of; what to tell those who follow. Nonsense is dropped."""
        view = self._view
        match told:
            case ["exchange" | "failure" | "checkpoint" as kind, int(serial), at, *rest] if _are_good(serial, at):
                self._serials[peer] = max(self._serials.get(peer, 0), serial)
            case _:
                return []
        if kind == "exchange" and (made := self._exchange(peer, float(at), rest)) is not None:
            view.exchanges.append(made)
            return [{"kind": "exchange", **plain(made)}]
        match kind, rest:
            case "failure", [str(line)]:
                failure = FailureRow(view.next_serial(), float(at), peer, words(line))
                view.failures.append(failure)
                return [{"kind": "failure", **plain(failure)}]
            case "checkpoint", [int(step)] if number(step) is not None:
                view.checkpoints.append(CheckpointRow(view.next_serial(), float(at), peer, step))
        return []

    def _exchange(self, peer: PeerId, at: float, told: Any) -> ExchangeRow | None:
        """Of an exchange that both tell of, the word of the smaller id counts; None: it is the other's, or nonsense."""
        match told:
            case [str(partner), seconds, size, distance, str(path)]:
                pass
            case _:
                return None
        if number(seconds, 0.0, 1e6) is None or number(size) is None:
            return None
        if partner in self._told and partner < peer:
            return None
        return ExchangeRow(
            n=self._view.next_serial(),
            at=at,
            a=peer,
            b=words(partner, 128),
            seconds=float(seconds),
            bytes=int(size),
            distance=number(distance),
            path="relayed" if path == "relayed" else "direct",
        )

    def _sum_up(self, now: float) -> None:
        """Totals and means of those who tell."""
        view = self._view
        rows = [row for row in view.peers.values() if row.state != "gone"]
        figures: dict[str, float] = {}
        for name, source in (
            ("tokens", "tokens"),
            ("tokens_per_s", "tokens_per_s"),
            ("exchanges", "exchanges"),
            ("failed", "failed"),
        ):
            if known := [getattr(row, source) for row in rows if getattr(row, source) is not None]:
                figures[name] = float(sum(known))
        for name in ("loss", "held_out", "disagreement"):
            if known := [getattr(row, name) for row in rows if getattr(row, name) is not None]:
                figures[name] = sum(known) / len(known)
        if rows and view.run.tokens_per_peer:
            figures["fraction"] = min(max(row.progress for row in rows) / view.run.tokens_per_peer, 1.0)
        view.figures = figures
        progress = max((row.progress for row in rows), default=0.0)
        if "disagreement" in figures:
            view.disagreement.add(progress, now, figures["disagreement"])
        if any(row.up is not None for row in rows):
            view.traffic.add(now, sum(row.up or 0.0 for row in rows), sum(row.down or 0.0 for row in rows))


def _are_good(serial: int, at: object) -> bool:
    return number(serial, 1) is not None and number(at) is not None
