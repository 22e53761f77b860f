"""Reachability management: decides which direct addresses and circuits a presence record announces.

A node asks a few others for a dial-back (``net.relay.dial_back``). If they cannot reach it, it takes reservations at
relays (``net.relay.relay``) and announces circuits through them. The circuits that other peers announce show which
nodes relay; other nodes refuse at once. One reservation is enough; two keep the node reachable when a relay fails.

IPv4 and IPv6 are judged separately, since a router may admit one and not the other. A node that can be dialed by one of
them announces that, and also takes reservations if others may lack it. Private addresses are announced only in a swarm
within one private network; on the internet ``net.relay.neighbours`` finds the peers of the same network.

Dial-backs from the same private network say nothing about the internet, since few routers lead a machine back in by its
public address. A node that only such neighbours can reach also takes reservations if the swarm has public addresses.
Without a majority of successful dial-backs a node takes reservations, too: an unneeded circuit costs little.

A node that nobody can dial is replaced by one whose p2pd punches holes (``net.relay.hole_punching``).

Resources: ``run`` closes the hole punching, and holds nothing else open. It handles NetworkError and RemoteError.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random

from p2ptrain.base.backoff import Backoffs
from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.net.node import Node
from p2ptrain.net.relay.candidates import Candidate, candidates, in_line, probers
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport, look
from p2ptrain.net.relay.hole_punching import HolePunching
from p2ptrain.net.relay.relay import RelayFullError, reserve
from p2ptrain.net.relay.second_look import look_by
from p2ptrain.net.relay.verdicts import (
    FAMILIES,
    announced,
    best_places,
    clock_off,
    is_elsewhere,
    needs_places,
    places_seen,
    verdicts,
)
from p2ptrain.ports import Notebook

WANTED = 2
"""Reservations held; the second one is for the failure of the first."""
ROUND_S = 15.0
"""Interval between renewals, and the longest time until a failed relay is noticed. Guess: measure how long relays live
against the cost of renewals."""
HURRY_S = 2.0
"""Interval while reachability is unknown or a needed relay is missing. Guess: measure the time until a new peer is
reachable."""
VERDICT_S = 600.0
"""Lifetime of a reachability check while our own addresses stay. Guess: measure how often routers change."""
PLACE_S = 60.0
"""Interval at which one node is asked where it sees us: providers give routers other public addresses, often daily. The
answer has a hundred bytes, and the next presence record is due within half a minute."""
ASKED_AT_ONCE = 4
"""Nodes asked for a reservation in one round; a silent one costs 10 s. Guess: measure the share of silent nodes."""
REFUSED_S = (30.0, 1800.0)
"""First and longest backoff after a refused reservation; it doubles. Guess: measure how long refusals last."""
OF_LINK_S = (2.0, 60.0)
"""First and longest backoff for nodes of the join link, one of which may be the only relay. They are short, so that the
node recovers soon after an outage on either side."""
FULL_S = 300.0
"""Least backoff after a relay had no room, for a node that has another one. Guess: measure how long relays are full."""
MAX_CLOCK_OFF_S = 30.0
"""Clock error beyond which the owner is warned. Records live for 75 s from their issuer's time (``swarm.rules``) and
must still be valid when a lookup finds them after half of that; a reported clock may be 10 s old."""
MAX_REFUSED = 512


class ReachabilityManager:
    """Keeps track of reachability, and holds reservations at relays when they are needed.

    Args:
        by_owner: whether the owner set the node's addresses (a forwarded port); they are then announced unchanged.
        relays: whether this node relays; the log entry about reachability says so.
        may_punch: whether the node may be replaced by one whose p2pd punches holes.
        told: verdicts about the node that this one replaces, which are not reported again; None if there is none.
        on_change: called when ``addresses`` have changed.
    """

    def __init__(
        self,
        node: Node,
        notebook: Notebook,
        *,
        by_owner: bool = False,
        relays: bool = False,
        may_punch: bool = False,
        told: Mapping[int, bool] | None = None,
        on_change: Callable[[], Awaitable[None]] | None = None,
        random: Random | None = None,
    ) -> None:
        self._node = node
        self._notebook = notebook
        self._by_owner = by_owner
        self._relays = relays
        self._may_punch = may_punch
        self._punching = HolePunching(node)
        self._on_change = on_change
        self._random = random or Random()
        self._seen: tuple[str, ...] = ()
        self._held: BoundedDict[PeerId, Candidate] = BoundedDict(WANTED)  # relays at which we hold a reservation
        self._refused: Backoffs[PeerId] = Backoffs(REFUSED_S, MAX_REFUSED)
        self._judged_at = -math.inf
        self._own: frozenset[str | int] = frozenset()  # our addresses and the mapped port
        self._had_company = False  # whether the DHT knew another node at the last update
        self._has_told_of_none = False
        self._clock_is_wrong = False
        self._wake = asyncio.Event()
        self._reports: Sequence[ReachabilityReport] = ()  # of the last verdict
        self._placed_at = -math.inf
        self._told = told
        self.verdicts: dict[int, bool] = dict.fromkeys(FAMILIES, False) if node.daemon.punches else {}
        """By address family (4, 6), whether others can dial us by it; absent if unknown. A node whose p2pd punches
        holes begins with the verdict that made it so."""
        self._last: frozenset[str] = frozenset()  # addresses at the last update

    @property
    def reachable(self) -> bool | None:
        """Whether others can dial us, by IPv4 or IPv6; None if unknown."""
        return any(self.verdicts.values()) if self.verdicts else None

    @property
    def addresses(self) -> tuple[str, ...]:
        circuits = [
            address.through(relay, place) for relay, each in self._held.items() for place in best_places(each.addresses)
        ]
        if self._by_owner:
            return tuple(dict.fromkeys([*self._node.addresses, *circuits]))
        return announced(self._node.addresses, self._seen, circuits, self.verdicts, self._shared)

    @property
    def _shared(self) -> set[int]:
        """Families whose private addresses the swarm's nodes can use, as they see us there, or have no others."""
        known = (each for places in self._node.known.values() for each in places)
        is_private = not any(map(address.is_public, known))
        outside = {address.family_of(each.place) for each in self._reports if address.is_public(each.place)}
        return {each for each in FAMILIES if each not in outside and (each in self.verdicts or is_private)}

    @property
    def is_punching(self) -> bool:
        """Whether p2pd punches holes through the router."""
        return self._punching.is_active

    @property
    def is_settled(self) -> bool:
        """Whether it is known how others reach this node, or that they cannot."""
        return bool(self.reachable or self._held or self._has_told_of_none)

    @property
    def is_misplaced(self) -> bool:
        """Whether the node should be replaced by one whose p2pd punches holes, because nobody can dial it."""
        is_plain = self._node.port > 0 and not self._node.daemon.punches
        return self._may_punch and is_plain and self.reachable is False

    async def run(self) -> None:
        """Keep the addresses up to date while p2pd runs. Returns early if ``is_misplaced``."""
        try:
            await self._run()
        finally:
            await self._punching.close()

    async def _run(self) -> None:
        while self._node.alive:
            await self._look_at_itself()
            await self._ask_without_dial()
            await self._check_place()
            if self.reachable is False and not self._held:  # as the last verdict says; another takes five seconds
                await self._update_places()
            await self._judge(time.monotonic())
            if self.is_misplaced and math.isfinite(self._judged_at):
                await self._node.port_mapping_tried()
                await self._look_at_itself()
                if math.isfinite(self._judged_at):  # no mapping has come meanwhile
                    return
                continue
            await self._update_places()
            is_served = self.reachable or self._held
            await self._rest((ROUND_S if is_served else HURRY_S) * self._random.uniform(0.75, 1.25))

    def refresh(self) -> None:
        """Find out anew how others reach us: our addresses have changed, or the router may be another one."""
        self._judged_at = -math.inf
        self._refused.clear()
        self._wake.set()

    async def _rest(self, seconds: float) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _update_places(self) -> None:
        """Take or renew reservations if they are needed, and announce the addresses if they have changed."""
        if not await self._punching.ready():
            return
        if needs_places(self.verdicts, self._reports, self._node.known, self._ports):
            await self._renew()
            await self._fill(time.monotonic())
        else:
            self._held.clear()  # the reservations expire at the relays
        before, self._last = self._last, frozenset(self.addresses)
        if self._last != before and self._on_change is not None:
            with contextlib.suppress(NetworkError):  # the record is announced three times in its lifetime anyway
                await self._on_change()

    async def _look_at_itself(self) -> None:
        """Update our addresses; new ones invalidate the last check, and like a restored connection end backoffs."""
        with contextlib.suppress(NetworkError):  # p2pd has died, and ``run`` ends; or p2pd hangs, and is killed soon
            await self._node.look_at_itself()
        own, self._own = self._own, frozenset((*self._node.addresses, self._node.mapped_port))
        had, self._had_company = self._had_company, self._node.has_company
        if own != self._own:
            self._judged_at = -math.inf
        if own != self._own or self._had_company > had:
            self._refused.clear()

    async def _judge(self, now: float) -> None:
        if now - self._judged_at < VERDICT_S:
            return
        reports: list[ReachabilityReport] = []
        ports = self._ports
        if ports:
            asked = self._probers()
            reports = await self._reports_of(asked)
            if found := verdicts(reports):
                for family in ports.keys() - found.keys():
                    reports += await look_by(family, self._node, asked, ports[family])
        found = verdicts(reports) if ports else {4: False}
        if not found:
            return
        self._judged_at, self._placed_at = now, asyncio.get_running_loop().time()
        self._reports = reports
        self._seen = places_seen(reports, ports)
        self.verdicts = found
        if found != self._told:
            self._told = found
            self._tell(reports, ports)

    def _tell(self, reports: Sequence[ReachabilityReport], ports: Mapping[int, int]) -> None:
        """Note whether others can dial us, and at which address."""
        told = [each for each in reports if each.place] or list(reports)
        if self.reachable:
            told = [each for each in told if each.dialed is DialOutcome.YES]
            hosts = {address.family_of(each.place) or 4: address.host_port(each.place) for each in reversed(told)}
            first = next(iter(ports.values()))  # the one port that was dialed where only one family has any
            there = [(hosts[each].rpartition(":")[0], ports.get(each, first)) for each in FAMILIES if each in hosts]
            where = " and ".join(f"{host}:{port}" for host, port in there)
            self._notebook.note("reachable", where=where, relays=self._relays)
        else:
            where = next((address.host_of(each.place) for each in told if each.place), "")
            why = next((each.why for each in reports if each.dialed is DialOutcome.NO), "it does not listen")
            self._notebook.note("unreachable", where=where, why=why, port=ports.get(4, 0), own=self._own_host)

    async def _ask_without_dial(self) -> None:
        """Learn our public address without a dial-back, which takes five seconds behind a router that drops packets, if
        p2pd is to punch holes; and which time is right, if the system's clock has jumped."""
        if self._punching.needs_observer or not wall.is_judged:
            await self._reports_of(self._probers(), port=0)

    async def _reports_of(self, nodes: Sequence[Candidate], port: int | None = None) -> list[ReachabilityReport]:
        """Return what nodes report of us; their clocks, and where they see us, count in any case."""
        answers = await asyncio.gather(*(self._ask(each, port) for each in nodes))
        reports = [each for each in answers if each is not None]
        self._mind_the_clock(reports)
        self._punching.show([each.place for each in reports if each.place])
        return reports

    async def _check_place(self) -> None:
        """Invalidate the last verdict if nodes see us at another public address: a router has got another one.

        One node a minute is asked, and a second one only to confirm what it says, so that a single node cannot discard
        verdicts.
        """
        now = asyncio.get_running_loop().time()
        if now - self._placed_at < PLACE_S or self._by_owner or not math.isfinite(self._judged_at):
            return
        self._placed_at = now
        first, *others = [*reversed(self._probers()), None][:2]  # rather a peer than a bootstrap
        if first is None or not await self._sees_elsewhere(first, default=False):
            return
        if all([each is None or await self._sees_elsewhere(each, default=True) for each in others]):
            self.refresh()

    async def _sees_elsewhere(self, prober: Candidate, default: bool) -> bool:
        """Return whether a node sees us at another public address; ``default`` if it does not answer."""
        answer = await self._ask(prober, port=0)
        return default if answer is None else is_elsewhere(answer, self._reports)

    def _mind_the_clock(self, reports: Sequence[ReachabilityReport]) -> None:
        off = clock_off(reports, wall())
        if off is not None and (jump_s := wall.jump_s):
            is_news, is_right = not wall.is_judged, wall.judge(off)
            if is_right or is_news:
                self._notebook.note("clock jumped", by_s=jump_s, is_right=is_right, nodes=len(reports))
            off += jump_s if is_right else 0.0
        if off is None or (abs(off) > MAX_CLOCK_OFF_S) == self._clock_is_wrong:
            return
        self._clock_is_wrong = not self._clock_is_wrong
        self._notebook.note("wrong clock" if self._clock_is_wrong else "right clock", off_s=off, nodes=len(reports))

    async def _ask(self, prober: Candidate, port: int | None = None) -> ReachabilityReport | None:
        try:
            if port == 0:
                return await look(self._node, prober.peer, prober.addresses, 0)
            ports = set(self._ports.values())
            if len(ports) == 1:
                return await look(self._node, prober.peer, prober.addresses, *ports)
            # The family of our connection decides which port the node must dial.
            seen = await look(self._node, prober.peer, prober.addresses, 0)
            port = self._ports.get(address.family_of(seen.place) or 4, 0)
            return await look(self._node, prober.peer, prober.addresses, port)
        except (NetworkError, RemoteError):
            return None

    async def _renew(self) -> None:
        held = list(self._held.values())
        for relay, failure in zip(held, await asyncio.gather(*map(self._reserve, held)), strict=True):
            if failure:
                del self._held[relay.peer]
                self._notebook.note("relay lost", peer=relay.peer, why=failure)

    async def _fill(self, now: float) -> None:
        """Ask a few candidates for missing reservations, and nodes of the join link while none is at one of them."""
        of_link = self._of_link
        left = [each for each in self._candidates() if self._refused.until(each.peer) <= now]
        for _ in range(ASKED_AT_ONCE):
            line = in_line(left, of_link, self._held)
            is_of_link = bool(line) and line[0].peer in of_link
            lacks = len(self._held) < WANTED or (is_of_link and of_link.isdisjoint(self._held))
            if not line or not lacks:
                return
            candidate = line[0]
            left.remove(candidate)
            if not await self._reserve(candidate):
                self._held[candidate.peer] = candidate
                self._has_told_of_none = False
                self._notebook.note("relayed", peer=candidate.peer)
        if not self._held and not self._has_told_of_none and self.reachable is False:
            self._has_told_of_none = True
            self._notebook.note("no relay", port=self._ports.get(4, 0), own=self._own_host)

    async def _reserve(self, relay: Candidate) -> str:
        """Take or renew one reservation; return why it failed, or an empty string."""
        try:
            await reserve(self._node.daemon, relay.peer, relay.addresses, redial=not relay.is_relayed)
        except NetworkError as error:
            pauses_s = OF_LINK_S if relay.peer in self._of_link else REFUSED_S
            is_full = isinstance(error, RelayFullError) and bool(self._held)
            self._refused.fail(relay.peer, time.monotonic(), pauses_s, FULL_S if is_full else 0.0)
            return str(error)
        self._refused.forget(relay.peer)
        return ""

    def _probers(self) -> list[Candidate]:
        return probers(self._candidates(), self._of_link, self._random)

    def _candidates(self) -> list[Candidate]:
        return candidates(self._node.known, self._of_link, self._node.peer_id, self._random)

    @property
    def _of_link(self) -> set[PeerId]:
        """Nodes of the join link, and the relays in their addresses."""
        known, bootstraps = self._node.known, self._node.bootstraps
        relays = {address.relay_of(each) for peer in bootstraps for each in known.get(peer, ())}
        return {*bootstraps, *filter(None, relays)}

    @property
    def _ports(self) -> dict[int, int]:
        """Port for a dial-back by address family: set by the owner, mapped by the router, or our listening port.

        Empty if we do not listen.
        """
        told, port = self._node.addresses, self._node.port
        if self._by_owner:
            return {address.family_of(each) or 4: address.port_of([each]) for each in reversed(told)}
        families = {address.family_of(each) for each in told if address.family_of(each) == 4 or address.is_public(each)}
        ports = dict.fromkeys([each for each in FAMILIES if each in families] or [4], port) if port else {}
        if self._node.mapped_port:
            ports[4] = self._node.mapped_port
        return ports

    @property
    def _own_host(self) -> str:
        own = [each for each in self._node.addresses if address.family_of(each) != 6] or self._node.addresses
        return next(map(address.host_of, own), "")
