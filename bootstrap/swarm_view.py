"""The swarm as a bootstrap's page shows it: presence records, and the figures that peers report if their owners agreed.

All of it comes from strangers. It is checked for shape and bounds (``p2ptrain.page``), shown to people, and used for
nothing else. Swarm-wide figures are medians and bounded sums, which a few peers cannot dominate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from bootstrap.aggregates import summed
from bootstrap.messages import Say
from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.manifest import SignedManifest, parameter_count
from p2ptrain.net import address
from p2ptrain.net.figures_service import ask_figures
from p2ptrain.page.contributors import reported
from p2ptrain.page.figures import MOST_SHOWN
from p2ptrain.page.memory import SAVE_S, PageMemory
from p2ptrain.page.public import PATH
from p2ptrain.page.samples import SampleText
from p2ptrain.page.untrusted import number, paragraph, words
from p2ptrain.page.view import (
    MOST_PEERS,
    PUNCHED,
    CheckpointRow,
    ExchangeRow,
    FailureRow,
    PeerRow,
    RunFacts,
    View,
    row_of,
    row_of_record,
)
from p2ptrain.ports import Transport
from p2ptrain.swarm import PeerState, Presence

POLL_S = 3.0
"""Interval between two rounds of requests, and so the age of what is shown. Guess: ask readers."""
MAX_ASKED = 64
"""Most reporting peers asked in one round; responses are bounded (``figures_service``) to 2 MB together."""
AT_ONCE = 8
"""Most concurrent requests to reporting peers, and to other peers, so that silent peers delay no reporting ones. Guess:
measure response times; well below a second is usual, and a timeout takes 10 s."""
KEPT_S = 60.0
"""Pause before another request to a peer that declined or did not answer."""
SILENT_S = 120.0
"""Time after which the figures of a silent peer are removed. Guess: measure outages; this is two requests."""
MAX_SERIALS = 4 * MOST_PEERS
"""Most peers whose last event is remembered. Guess: count the peers that return."""
HELD_S = 20.0
"""Shortest time that a text is shown, for a hundred words. Guess: ask readers; no peer writes more often."""
CURVE_S = 300.0
"""Interval at which another peer's curve replaces the oldest one. Guess: ask readers; a curve stays for hours."""
OVER = 0.995
"""Fraction of a run that counts as its end: what the page shows as 100 %."""
BEYOND_THE_END = 1.1
"""Largest plausible progress, in runs: exchanges move a peer little past the end. Guess: measure finished peers."""


@dataclass(frozen=True, slots=True)
class Report:
    at: float
    row: Mapping[str, Any]


class SwarmView:
    def __init__(self, signed: SignedManifest, wall: Callable[[], float] = wall) -> None:
        manifest = signed.manifest
        self._view = View("bootstrap", state="serving")
        self._view.run = RunFacts(
            name=manifest.run.name,
            id=signed.run_id,
            parameters=parameter_count(manifest.model),
            run_tokens=manifest.run.tokens,
            recipe=manifest.outer.recipe,
            codec=manifest.codec.name,
        )
        self._is_open = manifest.admission.policy == "open"
        self._wall = wall
        self._most_progress = BEYOND_THE_END * manifest.run.tokens
        self._records: dict[PeerId, Presence] = {}  # the newest record of each live peer
        self._left: dict[PeerId, Presence] = {}
        """Records of peers that left, until they expire, because older ones may still be found."""
        self._told: dict[PeerId, Report] = {}
        self._texts: dict[PeerId, str] = {}
        """The newest text of each peer."""
        self._waiting: dict[PeerId, SampleText] = {}
        """Texts that were not shown yet, at most one of each peer; the peer that waited longest comes first."""
        self._text_at = float("-inf")  # when the shown text's turn began
        self._memory = PageMemory()
        self._curve_at = float("-inf")  # when the last curve began
        self._serials: BoundedDict[PeerId, int] = BoundedDict(MAX_SERIALS)  # serial number of each peer's last event
        self._not_before: dict[PeerId, float] = {}

    def join(self, command: str, note: str = "") -> None:
        """Show the command for others to join, and a note about its reach, if the run is open."""
        if self._is_open:
            self._view.join, self._view.join_note = command, note

    def publish(self) -> None:
        """Show where everybody may read the public part."""
        self._view.public = PATH

    def remember(self, home: Path) -> None:
        """Show what the home remembers of the run, and save it there."""
        self._memory = PageMemory.load(home, self._view.run.id)
        self._view.contributions, self._view.samples = self._memory.contributions, self._memory.samples

    def save(self, say: Say) -> None:
        """Save what the page remembers; tell the owner if that fails."""
        try:
            self._memory.save()
        except OSError as error:
            say("bootstrap", f"contributions and texts could not be saved: {error.strerror}")

    async def keep(self, say: Say) -> None:
        """Save periodically, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            self.save(say)

    def failed(self, why: str) -> None:
        row = FailureRow(self._view.next_serial(), self._wall(), "", words(why))
        self._view.add(row)

    def meet(self, records: Iterable[Presence], total: int | None) -> None:
        """Update the live peers.

        Args:
            records: found records, of leaving peers, too.
            total: None if these are all peers; otherwise the approximate number of peers of which they are a sample,
                and other peers stay until their records expire.
        """
        now = self._wall()
        self._take(records, total is None, now)
        self._view.place([self._row(each, now) for each in self._records.values()], total, now)
        self._told = {peer: word for peer, word in self._told.items() if peer in self._records}
        for peer in self._texts.keys() - self._told.keys():
            self._drop_text(peer)
        self._sum_up(now)

    def told(self, peer: PeerId, row: Mapping[str, Any], news: Sequence[Any]) -> None:
        """Take a peer's report."""
        now = self._wall()
        if peer not in self._records:
            return  # it has left
        self._told[peer] = Report(now, row)
        known = self._row(self._records[peer], now)
        self._view.renew(known, now)
        self._draw(known, now)
        if (work := reported(RunId(self._view.run.id), peer, row, known.nickname, self._progress, now)) is not None:
            self._view.contributions.take(work)
        if isinstance(text := row.get("sample"), str):
            self._take_text(peer, SampleText(now, peer, known.step, "", paragraph(text), known.progress))
            self._show_text(now)
        for each in news:
            self._news(peer, each, now)

    def forget(self, peer: PeerId, is_withdrawn: bool = False) -> None:
        """Remove the figures, curve and text of a peer that stopped reporting; its past events stay.

        Args:
            is_withdrawn: its owner does not share figures any more: its contribution and all its texts go, too.
        """
        now = self._wall()
        if is_withdrawn:
            self._view.contributions.forget(peer)
            self._view.samples.forget(peer)
        if self._told.pop(peer, None) is None:
            return
        self._view.curves.pop(peer, None)
        self._drop_text(peer)
        if self._view.sample is not None and self._view.sample.peer == peer:
            self._view.sample, self._text_at = None, float("-inf")
        self._show_text(now)
        if peer in self._records:
            self._view.renew(self._row(self._records[peer], now), now)
        self._sum_up(now)

    def document(self) -> dict[str, Any]:
        return self._view.document(self._wall())

    async def ask(self, transport: Transport, random: Random) -> None:
        """Ask peers for their figures, until cancelled. Survives NetworkError and RemoteError."""
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
                due = {each.peer: each.addresses for each in self._records.values()}
                waiting = [peer for peer in due if peer not in self._not_before | dict.fromkeys(tellers | others)]
                for among, most in ((tellers, MAX_ASKED), (others, AT_ONCE)):
                    ready = [peer for peer in waiting if (peer in self._told) is (among is tellers)]
                    for peer in random.sample(ready, min(len(ready), most - len(among))):
                        among.add(peer)
                        tasks.create_task(one(peer, due[peer], among))
                await asyncio.sleep(POLL_S)

    async def _answers(self, transport: Transport, peer: PeerId, places: Sequence[str]) -> bool:
        try:
            answer = await ask_figures(transport, peer, places, self._serials.get(peer, 0))
        except (NetworkError, RemoteError):
            word = self._told.get(peer)
            if word is not None and self._wall() - word.at > SILENT_S:
                self.forget(peer)
            return False
        if answer is None:
            self.forget(peer, is_withdrawn=True)
            return False
        self.told(peer, *answer)
        return True

    @property
    def _progress(self) -> float:
        """Tokens of all peers so far; before the first estimate, those of a whole run."""
        return self._view.contributions.progress or self._most_progress

    def _take_text(self, peer: PeerId, text: SampleText) -> None:
        """Take a peer's current text, which may be unchanged."""
        if self._texts.get(peer) != text.text:
            self._texts[peer] = text.text
            self._waiting[peer] = text  # a peer that waits already keeps its place

    def _drop_text(self, peer: PeerId) -> None:
        self._texts.pop(peer, None)
        self._waiting.pop(peer, None)

    def _show_text(self, now: float) -> None:
        """Show the text that waited longest, once the shown one had its time."""
        if self._waiting and now - self._text_at >= HELD_S:
            self._view.write(self._waiting.pop(next(iter(self._waiting))))
            self._text_at = now

    def _take(self, found: Iterable[Presence], is_all: bool, now: float) -> None:
        before = {} if is_all else self._records | self._left
        newest = {peer: each for peer, each in before.items() if each.issued_at + each.lifetime_s > now}
        for each in found:
            if each.peer not in newest or newest[each.peer].issued_at <= each.issued_at:
                newest[each.peer] = each
        here = [each for each in newest.values() if each.state is not PeerState.LEAVING]
        self._records = {each.peer: each for each in here[:MOST_PEERS]}  # shown peers stay
        gone = [each for each in newest.values() if each.state is PeerState.LEAVING]
        self._left = {each.peer: each for each in gone[-MOST_PEERS:]}

    def _row(self, record: Presence, now: float) -> PeerRow:
        """Return a peer's row; its last report gives the age by our clock, because the peer's clock may be wrong."""
        base, word = row_of_record(record, now, address.way_to(record.addresses)), self._told.get(record.peer)
        age_s = base.age_s if word is None else min(base.age_s, max(now - word.at, 0.0))
        base = replace(base, progress=min(base.progress, self._most_progress), age_s=age_s)
        return base if word is None else row_of(record.peer, word.row, base, self._most_progress)

    def _draw(self, row: PeerRow, now: float) -> None:
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

    def _news(self, peer: PeerId, told: Any, now: float) -> None:
        """Take one event of a peer, dated ``now`` at most, unless it is malformed."""
        view = self._view
        match told:
            case ["exchange" | "failure" | "checkpoint" as kind, int(serial), at, *rest]:
                if number(serial, 1) is None or number(at) is None:
                    return
                self._serials[peer] = serial  # also a lower one, after a restart
            case _:
                return
        match kind, rest:
            case "exchange", _:
                if (made := self._exchange(peer, min(at, now), rest)) is not None:
                    view.add(made)
            case "failure", [str(line)]:
                view.add(FailureRow(view.next_serial(), min(at, now), peer, words(line)))
            case "checkpoint", [int(step)] if number(step) is not None:
                view.add(CheckpointRow(view.next_serial(), min(at, now), peer, step))

    def _exchange(self, peer: PeerId, at: float, told: Any) -> ExchangeRow | None:
        """Return an exchange; None if it is malformed, or if the partner, with the smaller id, reports it, too."""
        match told:
            case [str(partner), seconds, size, distance, str(path)] if not (partner in self._told and partner < peer):
                if number(seconds, 0.0, 1e6) is not None and number(size) is not None:
                    return ExchangeRow(
                        n=self._view.next_serial(),
                        at=at,
                        a=peer,
                        b=words(partner, 128),
                        seconds=float(seconds),
                        bytes=int(size),
                        distance=number(distance, 0.0, MOST_SHOWN),
                        path=path if path in ("relayed", PUNCHED) else "direct",
                    )
        return None

    def _sum_up(self, now: float) -> None:
        """Update the swarm-wide figures; after the last peer has left, the last ones stay."""
        view = self._view
        rows = [row for row in view.peers.values() if row.state != "gone"]
        if not rows and view.figures:
            for name in ("tokens_per_s", "swarm_tokens_per_s", "remaining_s", "up", "down"):
                view.figures.pop(name, None)
            left = [each.progress for each in self._left.values()]  # newer than what they told
            if left:
                fraction = min(median(left) / view.run.run_tokens, 1.0)
                view.figures["fraction"] = max(fraction, view.figures.get("fraction", 0.0))
            view.why = "no peer is here at the moment; these are the last figures"
            if view.figures.get("fraction", 0.0) >= OVER:
                view.why = "the run has ended; these are the last figures"
            return
        view.why = ""
        figures, progress = summed(rows, view.run.run_tokens, view.total_peers)
        view.figures = figures
        view.contributions.observe(progress, now)
        if "disagreement" in figures:
            view.disagreement.add(progress, now, figures["disagreement"])
        if "up" in figures and "down" in figures:
            view.traffic.add(now, figures["up"], figures["down"])
