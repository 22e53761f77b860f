"""Findings from the observations of other nodes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.net import address
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport
from p2ptrain.net.relay.reachability import MAX_CLOCK_OFF_S
from p2ptrain.net.relay.verdicts import FAMILIES, direct, is_symmetric
from p2ptrain.net.relay.verdicts import verdicts as by_family
from peer.doctor.findings import Finding, bad, note, ok, skipped

CLOCK_NOTE_S = 5.0
"""Clock offset in seconds that is worth a note: more than any network's delay. Guess: clock offsets of
healthy peers."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One node's view of this machine."""

    sight: ReachabilityReport
    clock_ahead_s: float = 0.0
    """Seconds by which our clock is ahead of the node's."""


def clock_ahead(asked_at: float, answered_at: float, theirs: float) -> float:
    """Return the smallest offset in seconds that explains a clock read ``theirs`` between our two times."""
    lowest, highest = asked_at - theirs, answered_at - theirs
    return 0.0 if lowest <= 0 <= highest else min(lowest, highest, key=abs)


def clock(seen: Sequence[Observation]) -> Finding:
    """Report the median clock offset, as single nodes may be wrong themselves."""
    if not seen:
        return skipped("clock", "no node answered, so no clock could be compared")
    off = statistics.median(each.clock_ahead_s for each in seen)
    words = f"{abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} {_nodes(len(seen))}"
    fix = "Set the clock: timedatectl set-ntp true (Linux), or: sudo sntp -sS time.apple.com (macOS)."
    if abs(off) >= MAX_CLOCK_OFF_S:
        return bad("clock", f"{words}; others ignore this machine's presence records", fix)
    if abs(off) >= CLOCK_NOTE_S:
        return note("clock", words, fix)
    return ok("clock", f"agrees with {_nodes(len(seen))}")


def router(seen: Sequence[Observation], own: Sequence[str], mapped: Sequence[str] = (), port: int = 0) -> Finding:
    """Report the kind of router that this machine, with its ``own`` addresses, is behind, if any.

    Args:
        mapped: the addresses that nodes saw of connections from one local port, ``port``.
    """
    links = [each for each in seen if each.sight.place and address.relay_of(each.sight.place) is None]
    links = [each for each in links if address.family_of(each.sight.place) == 4] or links  # IPv6 needs no translation
    if links and all(address.is_loopback(each.sight.place) for each in links):
        return skipped("router", "only nodes on this machine answered, which see no router")
    far = [each for each in links if address.is_public(each.sight.place)] or links
    if not far:
        return skipped("router", "no node answered, so this machine's public address is unknown")
    hosts = list(dict.fromkeys(address.host_of(each.sight.place) for each in far))
    if all(host in own for host in hosts):
        return ok("router", f"none: others see this machine's own address, {hosts[0]}")
    words = f"others see {', '.join(hosts)}, the address of a router"
    if len(hosts) > 1:
        words += "; several addresses, as in a large provider's network"
    if is_symmetric(mapped):
        fix = "Forward a port, or use IPv6; otherwise relays carry exchanges with peers that cannot be dialed either."
        return note("router", f"{words}; it uses another port for each destination, so it lets no hole be punched", fix)
    observers = direct(mapped)
    if len(observers) > 1 or address.port_of(observers) == port > 0:
        words += (
            "; it uses one port for all destinations, so most peers behind routers can connect to this one directly"
        )
    return note("router", words)


def reach(
    seen: Sequence[Observation], port: int, own: str, has_relay: bool | None, silent: Sequence[str] = ()
) -> Finding:
    """Report whether others can dial this machine.

    Args:
        port: port that they tried; 0: we do not listen.
        own: this machine's local address, for the router's settings.
        has_relay: whether a relay granted a reservation; None: none was asked.
        silent: why nodes did not answer.
    """
    if port == 0:
        return skipped("reach", "this machine does not listen, so no node was asked to dial it")
    sights = [each.sight for each in seen]
    found = by_family(sights)
    if not found:
        reasons = dict.fromkeys([*(each.why for each in sights if each.why), *silent])
        return skipped(
            "reach", f"no node could test whether others can dial this machine{''.join(f'; {why}' for why in reasons)}"
        )
    tried = [each for each in sights if each.dialed is not DialOutcome.DECLINED]
    host = next((address.host_of(each.place) for each in tried if each.place), own)
    if any(found.values()):
        open_at = {address.family_of(each.place) or 4: each.place for each in tried if each.dialed is DialOutcome.YES}
        hosts = [address.host_port(open_at[family]).rpartition(":")[0] for family in FAMILIES if family in open_at]
        words = f"others can dial this machine at {' and '.join(f'{each or host}:{port}' for each in hosts)}"
        closed = [f"IPv{family}" for family in FAMILIES if found.get(family) is False]
        return ok("reach", f"{words}{f'; by {closed[0]} only a relay carries inbound links' if closed else ''}")
    why = next((each.why for each in tried if each.dialed is DialOutcome.NO and each.why), "nobody answers")
    if host == own:
        fix = f"Allow TCP port {port} in this machine's firewall, for instance: sudo ufw allow {port}/tcp"
    else:
        fix = (
            f"Forward TCP port {port} on your router to {own}, allow it in this machine's firewall, and start "
            f"with --listen /ip4/0.0.0.0/tcp/{port} --listen /ip6/::/tcp/{port}"
        )
    where = f"nobody can dial this machine at {host}:{port} ({why})"
    if has_relay:
        return note("reach", f"{where}; a relay carries inbound links, which is slower", f"{fix}.")
    return bad("reach", f"{where}, and no relay accepts it", f"{fix}; or ask somebody to run with --relay.")


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
