"""How others reach us: directly where they can, else through relays. Decides which addresses a presence record carries.

A node cannot know by itself whether strangers can dial it, so it asks a few others to (``net.relay.dial_back``).
Where they cannot, it takes reservations at relays (``net.relay.relay``) and announces the circuits through them. Any
node may be a relay:
bootstraps are by default, peers where their owners agreed, and which peers are shows in the circuits that others
announce; who relays nothing says so at once. One relay is enough; where there are more we hold two places, so that
nobody loses sight of us when one relay dies. Renewing a place is the relay's sign of life.

Neighbours in a private network say nothing of the world outside: a router leads few of its own back in by its public
address. So who is seen by neighbours alone, while others of the swarm are outside, takes places as well.

To be wrong costs little: a node that takes itself for unreachable has a circuit too many, and its direct addresses are
announced as well. So without a majority of those asked it asks for places.

Who closes what: ``run`` ends by cancellation; nothing else is open. It survives NetworkError and RemoteError.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from statistics import median_high, median_low

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.net.node import Node
from p2ptrain.net.relay.candidates import Candidate, candidates, witnesses
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport, look
from p2ptrain.net.relay.relay import reserve
from p2ptrain.ports import Notebook

WANTED = 2
"""Places at relays. One is enough, the other outlives it."""
ROUND_S = 15.0
"""Between two renewals, which tell whether the relays live. A guess: a dead one is missed for as long."""
HURRY_S = 2.0
"""The same while we need a relay and have none, or do not know yet whether we do. A guess."""
VERDICT_S = 600.0
"""How long a verdict on being dialed counts while our own addresses stay. A guess: routers change rarely."""
ASKED_AT_ONCE = 4
"""Nodes that are asked for a place in one round: where nobody answers, each costs 10 s. A guess."""
REFUSED_S = (30.0, 1800.0)
"""How long a node that gave no place is not asked again: doubling between the two. Guesses."""
OF_LINK_S = (2.0, 60.0)
"""The same of the link's nodes, of which one may be the only relay: when our line was away, or they were, we are back
soon after."""
MOST_CLOCK_OFF_S = 30.0
"""Beyond it the owner is told. Records live for 75 s from their issuer's time on (``swarm.rules``), and must still be
worth something when a lookup finds them half of that later; an answer about the time may be 10 s old."""
MAX_REFUSED = 512
MAX_OWN = 4
"""Addresses of our own in a record that also has circuits: a record has room for eight, of these lengths."""


def verdict(sights: Iterable[ReachabilityReport]) -> bool | None:
    """Whether strangers can dial us; None: nobody tried.

    Those who see us at a public address speak for the internet; only without them do neighbours in a private network
    count. Without a majority for it we cannot be dialed.
    """
    judged = _judges(sights)
    if not judged:
        return None
    return 2 * sum(each.dialed is DialOutcome.YES for each in judged) > len(judged)


def speaks_for_the_internet(sights: Iterable[ReachabilityReport]) -> bool:
    """Whether a verdict on them says more than what neighbours can do."""
    return any(address.is_public(each.place) for each in _judges(sights))


def _judges(sights: Iterable[ReachabilityReport]) -> list[ReachabilityReport]:
    tried = [each for each in sights if each.dialed is not DialOutcome.DECLINED]
    return [each for each in tried if address.is_public(each.place)] or tried


def places_seen(sights: Iterable[ReachabilityReport], port: int) -> tuple[str, ...]:
    """Where others dialed us at this port and found us, as most of them say who can tell alike.

    A single witness among several could name anybody's address, this machine's loopback among them, and we would send
    the whole swarm there. Who sees us at a public address and who sees us in a private network tell different things,
    and so do IPv4 and IPv6.
    """
    found: dict[tuple[bool, bool], Counter[str]] = {}
    for host in (address.ip_of(each.place) for each in sights if each.dialed is DialOutcome.YES):
        place = address.multiaddress(str(host), port)
        if host is not None and address.is_of_use(place):
            found.setdefault((host.is_global, host.version == 6), Counter())[place] += 1
    leading = [(*places.most_common(1)[0], places.total()) for places in found.values()]
    return tuple(place for place, times, of in leading if 2 * times > of)


def best_place(addresses: Sequence[str]) -> str:
    """By which of a relay's addresses most others can dial it."""
    return min(addresses, key=lambda each: not address.is_public(each))


def announced(
    own: Sequence[str], seen: Sequence[str], circuits: Sequence[str], reachable: bool | None, by_owner: bool
) -> tuple[str, ...]:
    """The addresses for a presence record, best first.

    Args:
        own: what the node listens on and others may use, or what its owner announces.
        seen: where others dialed us and found us.
        circuits: through relays.
        by_owner: ``own`` is the owner's word, which is not corrected.
    """
    if by_owner:
        return tuple(dict.fromkeys([*own, *circuits]))
    if reachable is False:
        # Public addresses of ours that nobody can dial would only cost everybody's time. Neighbours use private ones.
        near = [each for each in own if not address.is_public(each)]
        return tuple(dict.fromkeys([*circuits, *near[:MAX_OWN]]))
    kept = own[:MAX_OWN] if circuits else own  # only neighbours were asked: the circuits are for all others
    return tuple(dict.fromkeys([*circuits, *seen, *kept]))


def clock_off(sights: Iterable[ReachabilityReport], now: float) -> float | None:
    """So many seconds our clock, which says ``now``, is fast by the others' median; None: nobody was asked.

    Of two middle ones that nearer to us counts: one of two may lie.
    """
    clocks = [each.clock for each in sights]
    return min((now - middle(clocks) for middle in (median_low, median_high)), key=abs) if clocks else None


class ReachabilityManager:
    """See the module.

    Args:
        by_owner: the node's addresses are the owner's word (a forwarded port) and are not corrected.
        relays: it is a relay itself; who could be one and is not, is told so.
        on_change: called when ``addresses`` are others than before.
    """

    def __init__(
        self,
        node: Node,
        notebook: Notebook,
        *,
        by_owner: bool = False,
        relays: bool = False,
        on_change: Callable[[], Awaitable[None]] | None = None,
        random: Random | None = None,
    ) -> None:
        self._node = node
        self._notebook = notebook
        self._by_owner = by_owner
        self._relays = relays
        self._on_change = on_change
        self._random = random or Random()
        self._seen: tuple[str, ...] = ()
        self._held: dict[PeerId, Candidate] = {}
        """Relays that hold a place for us."""
        self._refused: dict[PeerId, tuple[float, float]] = {}
        """Who gave no place: until when it is not asked, and how long that is."""
        self._judged_at = -math.inf
        self._is_near = False
        """The verdict is neighbours' word alone."""
        self._own: frozenset[str] = frozenset()
        self._had_company = False
        """The node's addresses, and whether it had company, when we looked last."""
        self._has_told_of_none = False
        self._clock_is_wrong = False
        self.reachable: bool | None = None
        """Whether others can dial us; None: not known yet."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """What to announce, best first, without ``/p2p/``."""
        circuits = [address.through(relay, best_place(each.addresses)) for relay, each in self._held.items()]
        return announced(self._node.addresses, self._seen, circuits, self.reachable, self._by_owner)

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Those that hold a place for us."""
        return tuple(self._held)

    async def run(self) -> None:
        """Keep the addresses right for as long as p2pd lives."""
        while self._node.alive:
            before = self.addresses
            await self._look_at_itself()
            await self._judge(time.monotonic())
            if self._needs_places:
                await self._renew()
                await self._fill(time.monotonic())
            else:
                self._held.clear()  # the relays notice when their hour is over
            if set(self.addresses) != set(before) and self._on_change is not None:
                with contextlib.suppress(NetworkError):  # it is announced three times in its lifetime anyway
                    await self._on_change()
            is_settled = self.reachable or self._held
            await asyncio.sleep((ROUND_S if is_settled else HURRY_S) * self._random.uniform(0.75, 1.25))

    async def _look_at_itself(self) -> None:
        """Where this machine is now: a laptop that was carried elsewhere is judged anew.

        There, and when our line is back, whoever gave no place is asked again.
        """
        with contextlib.suppress(NetworkError):  # p2pd is gone, and ``run`` ends; or it hangs, and is ended soon
            await self._node.look_at_itself()
        own, self._own = self._own, frozenset(self._node.addresses)
        had, self._had_company = self._had_company, self._node.has_company
        if own != self._own:
            self._judged_at = -math.inf
        if own != self._own or self._had_company > had:
            self._refused.clear()

    async def _judge(self, now: float) -> None:
        """Ask others to dial us, where we do not know or have known for long."""
        if now - self._judged_at < VERDICT_S:
            return
        sights: list[ReachabilityReport] = []
        if self._port:
            answers = await asyncio.gather(*map(self._ask, self._witnesses()))
            sights = [each for each in answers if each is not None]
            self._mind_the_clock(sights)
        found = verdict(sights) if self._port else False
        if found is None:
            return
        self._judged_at = now
        self._seen = places_seen(sights, self._port)
        self._is_near = not speaks_for_the_internet(sights)
        if found == self.reachable:
            return
        self.reachable = found
        where = next((address.host_of(each.place) for each in sights if each.place), "")
        if found:
            self._notebook.note("reachable", where=f"{where}:{self._port}", relays=self._relays)
        else:
            why = next((each.why for each in sights if each.dialed is DialOutcome.NO), "it listens nowhere")
            self._notebook.note("unreachable", where=where, why=why, port=self._port, own=self._own_host)

    def _mind_the_clock(self, sights: Sequence[ReachabilityReport]) -> None:
        """Tell the owner when it is far off, and when it is right again."""
        off = clock_off(sights, time.time())
        if off is None or (abs(off) > MOST_CLOCK_OFF_S) == self._clock_is_wrong:
            return
        self._clock_is_wrong = not self._clock_is_wrong
        self._notebook.note("wrong clock" if self._clock_is_wrong else "right clock", off_s=off, nodes=len(sights))

    async def _ask(self, witness: Candidate) -> ReachabilityReport | None:
        try:
            return await look(self._node, witness.peer, witness.addresses, self._port)
        except (NetworkError, RemoteError):
            return None

    async def _renew(self) -> None:
        """Renew every place; those that are gone are given up."""
        held = list(self._held.values())
        for relay, failure in zip(held, await asyncio.gather(*map(self._reserve, held)), strict=True):
            if failure:
                del self._held[relay.peer]
                self._notebook.note("relay lost", peer=relay.peer, why=failure)

    async def _fill(self, now: float) -> None:
        """Ask a few for the places that we lack; and the link's nodes, while no place of ours is theirs."""
        asked, of_link = 0, self._of_link
        for candidate in self._candidates():
            until, _ = self._refused.get(candidate.peer, (now, 0.0))
            lacks = len(self._held) < WANTED or (candidate.peer in of_link and of_link.isdisjoint(self._held))
            if not lacks or asked >= ASKED_AT_ONCE:
                return
            if candidate.peer in self._held or until > now:
                continue
            asked += 1
            if not await self._reserve(candidate):
                if len(self._held) >= WANTED:  # it notices when its hour is over
                    del self._held[next(iter(self._held))]
                self._held[candidate.peer] = candidate
                self._has_told_of_none = False
                self._notebook.note("relayed", peer=candidate.peer)
        if not self._held and not self._has_told_of_none and self.reachable is False:
            self._has_told_of_none = True
            self._notebook.note("no relay", port=self._port, own=self._own_host)

    async def _reserve(self, relay: Candidate) -> str:
        """Take or renew one place; why not, if so."""
        try:
            await reserve(self._node.daemon, relay.peer, relay.addresses, redial=not relay.is_sheltered)
        except NetworkError as error:
            first, longest = OF_LINK_S if relay.peer in self._of_link else REFUSED_S
            _, pause = self._refused.pop(relay.peer, (0.0, first / 2))
            self._refused[relay.peer] = (time.monotonic() + min(2 * pause, longest), min(2 * pause, longest))
            while len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            return str(error)
        self._refused.pop(relay.peer, None)
        return ""

    def _witnesses(self) -> list[Candidate]:
        return witnesses(self._candidates(), self._of_link, self._random)

    def _candidates(self) -> list[Candidate]:
        return candidates(self._node.known, self._of_link, self._node.peer_id, self._random)

    @property
    def _of_link(self) -> set[PeerId]:
        """The link's nodes, and the relays that it leads to them through."""
        known, bootstraps = self._node.known, self._node.bootstraps
        relays = {address.relay_of(each) for peer in bootstraps for each in known.get(peer, ())}
        return {*bootstraps, *filter(None, relays)}

    @property
    def _needs_places(self) -> bool:
        """Whether some whom we know of cannot dial us, or we cannot tell."""
        if not self.reachable or not self._is_near:
            return self.reachable is False
        return any(address.is_public(each) for places in self._node.known.values() for each in places)

    @property
    def _port(self) -> int:
        """Where others would dial us: the owner's word, or a router's that mapped a port, else where we listen; 0:
        nowhere."""
        told = self._node.addresses if self._by_owner else tuple(filter(address.is_public, self._node.addresses))
        return address.port_of(told) or self._node.port

    @property
    def _own_host(self) -> str:
        """This machine's own address in its network, to forward a port to."""
        return next(map(address.host_of, self._node.addresses), "")
