"""Verdicts from reports of other nodes: whether and where they can dial us, and what a record announces. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_high, median_low

from p2ptrain.base.ids import PeerId
from p2ptrain.net import address, interfaces
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport

MAX_OWN = 4
"""Direct addresses in a record with circuits; a record has room for eight addresses."""
FAMILIES = (4, 6)
"""IPv4 and IPv6."""


def verdict(reports: Iterable[ReachabilityReport]) -> bool | None:
    """Return whether most dial-backs reached us, those from public addresses if any; None if no node tried."""
    judged = _judges(reports)
    if not judged:
        return None
    return 2 * sum(each.dialed is DialOutcome.YES for each in judged) > len(judged)


def verdicts(reports: Sequence[ReachabilityReport]) -> dict[int, bool]:
    """Return the verdict for each address family by which a node tried to dial us: 4, 6."""
    found = {family: verdict(by_family(reports, family)) for family in FAMILIES}
    return {family: each for family, each in found.items() if each is not None}


def by_family(reports: Iterable[ReachabilityReport], family: int) -> list[ReachabilityReport]:
    """Return the reports over IPv4 or IPv6; an unknown place counts as IPv4."""
    return [each for each in reports if (address.family_of(each.place) or 4) == family]


def speaks_for_the_internet(reports: Iterable[ReachabilityReport]) -> bool:
    return any(address.is_public(each.place) for each in _judges(reports))


def is_elsewhere(report: ReachabilityReport, earlier: Iterable[ReachabilityReport]) -> bool:
    """Return whether a report names a public IP address that no earlier one of its family does, if there is one."""
    family = address.family_of(report.place) or 4
    known = {address.host_of(each.place) for each in by_family(earlier, family) if address.is_public(each.place)}
    return bool(known) and address.is_public(report.place) and address.host_of(report.place) not in known


def _judges(reports: Iterable[ReachabilityReport]) -> list[ReachabilityReport]:
    tried = [each for each in reports if each.dialed is not DialOutcome.DECLINED]
    return [each for each in tried if address.is_public(each.place)] or tried


def places_seen(reports: Iterable[ReachabilityReport], ports: Mapping[int, int]) -> tuple[str, ...]:
    """Return our addresses at which dial-backs succeeded, each confirmed by a majority.

    Without a majority, a single report could direct the whole swarm at any address, loopback included. Public and
    private addresses, and IPv4 and IPv6, are counted separately. Our own IPv6 addresses that soon end are left out: the
    lasting ones, which we announce, are behind the same firewall.

    Args:
        ports: the port that was dialed, by address family.
    """
    found: dict[object, Counter[str]] = {}
    fleeting = interfaces.fleeting_addresses()
    for host in (address.ip_of(each.place) for each in reports if each.dialed is DialOutcome.YES):
        if host is None or host.version not in ports or str(host) in fleeting:
            continue
        place = address.multiaddress(str(host), ports[host.version])
        if interfaces.is_of_use(place):
            found.setdefault((address.is_on_internet(host), host.version == 6), Counter())[place] += 1
    return _majorities(found)


def _majorities(counted: Mapping[object, Counter[str]]) -> tuple[str, ...]:
    """Return the text of each counter that more than half of its observers named."""
    leading = [(*counts.most_common(1)[0], counts.total()) for counts in counted.values()]
    return tuple(text for text, times, of in leading if 2 * times > of)


def mapped_places(places: Iterable[str]) -> tuple[str, ...]:
    """Return the public addresses, at most one per family, to which the router maps our port, as most observers say.

    A connection that leaves from the listening port shows it. Without a majority there is none: the observers see
    different ports, or some of them lie.

    Args:
        places: the multiaddresses from which each observer saw a connection come; circuits do not count.
    """
    seen: dict[object, Counter[str]] = {}
    for place in direct(places):
        seen.setdefault(address.family_of(place), Counter())[place] += 1
    return _majorities(seen)


def is_symmetric(places: Iterable[str]) -> bool:
    """Return whether observers saw IPv4 connections from different ports, and most of them agree on none.

    Such a router uses another port for each destination (symmetric NAT, RFC 5389), which lets no hole be punched.
    """
    ports = [place for place in direct(places) if "/ip4/" in place]
    return len(set(ports)) > 1 and not mapped_places(ports)


def direct(places: Iterable[str]) -> list[str]:
    """Return the places of direct connections from a public IP address."""
    found = [each for each in places if address.ip_of(each) is not None and address.is_public(each)]
    return [address.split_peer(each)[0] for each in found if address.relay_of(each) is None]


def needs_places(
    verdicts: Mapping[int, bool],
    reports: Iterable[ReachabilityReport],
    known: Mapping[PeerId, Sequence[str]],
    ports: Collection[int],
) -> bool:
    """Return whether some known nodes may be unable to dial us.

    Args:
        verdicts: by address family, whether others can dial us.
        reports: which led to them.
        known: known nodes' addresses.
        ports: families by which we listen.
    """
    if not any(verdicts.values()):
        return bool(verdicts)
    public = [[*map(address.family_of, filter(address.is_public, each))] for each in known.values()]
    if not speaks_for_the_internet(reports):  # only nodes of a private network reported
        return any(public)
    lacks_4 = not verdicts.get(4, 4 in ports)  # by which all others can dial, unless they have IPv6 only
    only_6 = any(each and set(each) == {6} for each in public)
    return (lacks_4 and any({4, None} & {*each} for each in public)) or (not verdicts.get(6, True) and only_6)


def best_places(addresses: Sequence[str]) -> list[str]:
    """Return a relay's best address of IPv4 and of IPv6, public ones if there are any."""
    return address.best_of_each_family(sorted(addresses, key=lambda each: not address.is_public(each)))


def announced(
    own: Sequence[str],
    seen: Sequence[str],
    circuits: Sequence[str],
    verdicts: Mapping[int, bool],
    shared: Collection[int] = FAMILIES,
) -> tuple[str, ...]:
    """Return the addresses for a presence record, best first.

    Args:
        own: listen addresses that others may use.
        seen: addresses at which dial-backs succeeded.
        circuits: circuits through our relays.
        verdicts: by address family, whether others can dial us; absent if unknown.
        shared: families whose private addresses are announced, because the swarm is within our private network.
    """
    direct = list(dict.fromkeys([*seen, *own]))
    # Public addresses that nobody can dial would only cost dials.
    public = [each for each in direct if address.is_public(each) and verdicts.get(address.family_of(each) or 4, True)]
    private = [each for each in direct if not address.is_public(each) and (address.family_of(each) or 4) in shared]
    if circuits:
        # A dial tries four addresses: the best ones, then the circuits.
        best = address.best_of_each_family(public)
        public = [each for each in public if each not in best][: MAX_OWN - len(best)]
        return tuple(dict.fromkeys([*best, *circuits, *public, *private[:MAX_OWN]]))
    return (*public, *private)


def clock_off(reports: Iterable[ReachabilityReport], now: float) -> float | None:
    """Return by how many seconds our clock ``now`` is ahead of the median of the reports; None without reports.

    With two middle values the one nearer to our clock counts, because the other may be false.
    """
    clocks = [each.clock for each in reports]
    return min((now - middle(clocks) for middle in (median_low, median_high)), key=abs) if clocks else None
