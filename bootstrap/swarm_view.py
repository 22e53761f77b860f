"""The swarm as a bootstrap sees it: presence records, and what peers whose owners agreed tell of themselves.

All of it is strangers' word, checked for shape and bounds (``p2ptrain.page``), shown to people and used for nothing.
What stands for everybody is a median, or a sum in which nobody counts for much more than others: no few of them decide
it. Safe from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from bootstrap.aggregates import summed
from bootstrap.sample_rotation import SampleRotation
from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import SignedManifest, parameter_count
from p2ptrain.net import address
from p2ptrain.net.figures_service import ask_figures
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
from p2ptrain.page.view import MOST_PEERS, MOST_SHOWN
from p2ptrain.ports import Transport
from p2ptrain.swarm import PeerState, Presence

POLL_S = 3.0
"""Between two rounds of questions. A guess: the gossip that is shown is so old at most."""
MOST_ASKED = 64
"""Peers that tell and are asked in one round: of more, a sample. What they may answer is bounded
(``figures_service``): 2 MB a round."""
AT_ONCE = 8
"""Questions under way to peers that tell, and as many to those of whom nothing is known: who does not answer holds up
nobody who does. A guess: an answer takes well below a second, and none 10 s."""
KEPT_S = 60.0
"""Who keeps its figures, or does not answer, is asked again after so long."""
SILENT_S = 120.0
"""Figures of a peer that answers no more are taken down after so long. A guess: two questions later."""
MOST_SERIALS = 4 * MOST_PEERS
"""Peers of whom it is remembered how much of their news is known. A guess: for those who come back."""
CURVE_S = 300.0
"""Of more peers that tell than curves are drawn, another gets its turn so often. A guess: each is drawn for hours."""
OVER = 0.995
"""Of a run, by which it has come to its end: what the page shows as 100 %."""
BEYOND_THE_END = 1.1
"""Nobody is further, in runs: peers end at the run's end, and exchanges move their progress little. A guess."""

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Word:
    """What a peer told last."""

    at: float
    row: Mapping[str, Any]


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
        self._most_progress = BEYOND_THE_END * manifest.run.tokens_per_peer
        self._records: dict[PeerId, Presence] = {}
        """Of who is here: the newest record of each."""
        self._left: dict[PeerId, Presence] = {}
        """The records by which peers took their leave, while they last: older ones may still be found."""
        self._told: dict[PeerId, Word] = {}
        """Of those among them who tell."""
        self._texts = SampleRotation()
        self._curve_at = float("-inf")
        """When the last curve was begun."""
        self._serials: BoundedDict[PeerId, int] = BoundedDict(MOST_SERIALS)
        """Of the last news of each, the one heard of last at the end."""
        self._not_before: dict[PeerId, float] = {}
        self._tells: list[Tell] = []

    def on_event(self, tell: Tell) -> None:
        """Call ``tell`` with every exchange and failure from now on."""
        self._tells.append(tell)

    def join(self, command: str, note: str = "") -> None:
        """How others join, and how far that reaches."""
        if self._is_open:
            self._view.join, self._view.join_note = command, note

    def failed(self, why: str) -> None:
        """Something of our own did not work."""
        with self._lock:
            row = FailureRow(self._view.next_serial(), self._wall(), "", words(why))
            self._view.add_failure(row)
        for tell in self._tells:
            tell({"kind": "failure", **plain(row)})

    def meet(self, records: Iterable[Presence], total: int | None) -> None:
        """Who is here now.

        Args:
            records: those that were found, also of peers that are leaving.
            total: None: they are all. Else a sample of about so many peers: who is not in it stays until its record
                runs out.
        """
        now = self._wall()
        with self._lock:
            self._take(records, total is None, now)
            self._view.place([self._row(each, now) for each in self._records.values()], total, now)
            self._told = {peer: word for peer, word in self._told.items() if peer in self._records}
            self._texts.keep(set(self._told))
            self._sum_up(now)

    def told(self, peer: PeerId, row: Mapping[str, Any], news: Sequence[Any]) -> None:
        """A peer told of itself."""
        now, events = self._wall(), list[dict[str, Any]]()
        with self._lock:
            if peer not in self._records:
                return  # it has left meanwhile
            self._told[peer] = Word(now, row)
            known = self._row(self._records[peer], now)
            self._view.renew(known, now)
            self._draw(known, now)
            if isinstance(text := row.get("sample"), str):
                self._texts.told(SampleText(now, peer, known.step, "", paragraph(text)))
                self._view.sample = self._texts.shown
            for each in news:
                events += self._news(peer, each, now)
        for tell in self._tells:
            for event in events:
                tell(event)

    def forget(self, peer: PeerId) -> None:
        """It tells no more: take down its figures, its curve and its text. What happened stays among what happened."""
        now = self._wall()
        with self._lock:
            if self._told.pop(peer, None) is None:
                return
            self._view.curves.pop(peer, None)
            self._texts.forget(peer, now)
            self._view.sample = self._texts.shown
            if peer in self._records:
                self._view.renew(self._row(self._records[peer], now), now)
            self._sum_up(now)

    def document(self) -> dict[str, Any]:
        """What ``/status`` hands out."""
        with self._lock:
            return self._view.document(self._wall())

    async def ask(self, transport: Transport, random: Random) -> None:
        """Ask peers for their figures, for ever. Survives NetworkError and RemoteError."""
        loop = asyncio.get_running_loop()
        tellers: set[PeerId] = set()
        others: set[PeerId] = set()
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(peer: PeerId, places: Sequence[str], among: set[PeerId]) -> None:
            async with gate if among is tellers else contextlib.nullcontext():
                if not await self._answers(transport, peer, places):
                    self._not_before[peer] = loop.time() + KEPT_S
            among.discard(peer)

        async with asyncio.TaskGroup() as tasks:
            while True:
                now = loop.time()
                self._not_before = {peer: until for peer, until in self._not_before.items() if until > now}
                with self._lock:
                    due = {each.peer: each.addresses for each in self._records.values()}
                waiting = [peer for peer in due if peer not in self._not_before | dict.fromkeys(tellers | others)]
                for among, most in ((tellers, MOST_ASKED), (others, AT_ONCE)):
                    ready = [peer for peer in waiting if (peer in self._told) is (among is tellers)]
                    for peer in random.sample(ready, min(len(ready), most - len(among))):
                        among.add(peer)
                        tasks.create_task(one(peer, due[peer], among))
                await asyncio.sleep(POLL_S)

    async def _answers(self, transport: Transport, peer: PeerId, places: Sequence[str]) -> bool:
        """Ask one of them, and take in what it tells."""
        try:
            answer = await ask_figures(transport, peer, places, self._serials.get(peer, 0))
        except (NetworkError, RemoteError):
            word = self._told.get(peer)
            if word is not None and self._wall() - word.at > SILENT_S:
                self.forget(peer)
            return False
        if answer is None:
            self.forget(peer)
            return False
        self.told(peer, *answer)
        return True

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _take(self, found: Iterable[Presence], is_all: bool, now: float) -> None:
        """Records that were found, into those that are known: of two the newer one counts, and those last that last."""
        before = {} if is_all else self._records | self._left
        newest = {peer: each for peer, each in before.items() if each.issued_at + each.lifetime_s > now}
        for each in found:
            if each.peer not in newest or newest[each.peer].issued_at <= each.issued_at:
                newest[each.peer] = each
        here = [each for each in newest.values() if each.state is not PeerState.LEAVING]
        self._records = {each.peer: each for each in here[:MOST_PEERS]}  # who is shown stays shown
        gone = [each for each in newest.values() if each.state is PeerState.LEAVING]
        self._left = {each.peer: each for each in gone[-MOST_PEERS:]}

    def _row(self, record: Presence, now: float) -> PeerRow:
        """Its age is by our own clock, once it has told us anything: its may be wrong."""
        word = self._told.get(record.peer)
        seen_at = record.issued_at if word is None else max(record.issued_at, word.at)
        base = PeerRow(
            id=record.peer,
            nickname=words(record.nickname, 32),
            state=record.state.value,
            step=record.step,
            progress=min(record.progress, self._most_progress),
            age_s=max(now - seen_at, 0.0),
            path=address.way_to(record.addresses),
        )
        return base if word is None else row_of(record.peer, word.row, base, self._most_progress)

    def _draw(self, row: PeerRow, now: float) -> None:
        """Its curves go on. Where all places are taken, whoever was drawn for longest makes room now and then."""
        curves = self._view.curves
        is_new, curve = row.id not in curves, self._view.curve(row.id, row.nickname)
        if curve is None and now - self._curve_at > CURVE_S:
            del curves[next(iter(curves))]
            curve = self._view.curve(row.id, row.nickname)
        if curve is None:
            return
        if is_new:
            self._curve_at = now
        if row.loss is not None:
            curve.train.add(row.progress, now, row.loss)
        if row.held_out is not None and (not curve.held_out.points or curve.held_out.points[-1][2] != row.held_out):
            curve.held_out.add(row.progress, now, row.held_out)

    def _news(self, peer: PeerId, told: Any, now: float) -> list[dict[str, Any]]:
        """Take in one thing that a peer tells of; what to tell those who follow. Nonsense is dropped.

        Its clock may be fast, but nothing has happened in the future: that would stand first for ever.
        """
        view = self._view
        match told:
            case ["exchange" | "failure" | "checkpoint" as kind, int(serial), at, *rest] if _are_good(serial, at):
                self._serials[peer] = serial  # also a lower one: that of a process that was started again
            case _:
                return []
        if kind == "exchange" and (made := self._exchange(peer, min(at, now), rest)) is not None:
            view.add_exchange(made)
            return [{"kind": "exchange", **plain(made)}]
        match kind, rest:
            case "failure", [str(line)]:
                failure = FailureRow(view.next_serial(), min(at, now), peer, words(line))
                view.add_failure(failure)
                return [{"kind": "failure", **plain(failure)}]
            case "checkpoint", [int(step)] if number(step) is not None:
                view.add_checkpoint(CheckpointRow(view.next_serial(), min(at, now), peer, step))
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
            distance=number(distance, 0.0, MOST_SHOWN),
            path="relayed" if path == "relayed" else "direct",
        )

    def _sum_up(self, now: float) -> None:
        """Totals and medians of those who tell. Once the last peer has left, what the swarm came to stays."""
        view = self._view
        rows = [row for row in view.peers.values() if row.state != "gone"]
        if not rows and view.figures:
            for name in ("tokens_per_s", "up", "down"):
                view.figures.pop(name, None)
            left = [each.progress for each in self._left.values()]  # newer than what they told
            if left and view.run.tokens_per_peer:
                fraction = min(median(left) / view.run.tokens_per_peer, 1.0)
                view.figures["fraction"] = max(fraction, view.figures.get("fraction", 0.0))
            view.why = "nobody is here just now; these are the last figures"
            if view.figures.get("fraction", 0.0) >= OVER:
                view.why = "the run has ended; these are the last figures"
            return
        view.why = ""
        figures, progress = summed(rows, view.run.tokens_per_peer)
        view.figures = figures
        if "disagreement" in figures:
            view.disagreement.add(progress, now, figures["disagreement"])
        if "up" in figures and "down" in figures:
            view.traffic.add(now, figures["up"], figures["down"])


def _are_good(serial: int, at: object) -> bool:
    return number(serial, 1) is not None and number(at) is not None
