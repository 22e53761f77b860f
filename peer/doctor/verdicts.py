"""Findings from the observations of other nodes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.admission import Refusal, remedy
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net import address
from p2ptrain.net.path_mtu import PathVerdict, remedies
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport
from p2ptrain.net.relay.mapping import direct, is_symmetric
from p2ptrain.net.relay.reachability import MAX_CLOCK_OFF_S
from p2ptrain.net.relay.verdicts import FAMILIES
from p2ptrain.net.relay.verdicts import verdicts as by_family
from peer.doctor.findings import Finding, bad, note, ok, skipped
from peer.messages import size

CLOCK_NOTE_S = 5.0
"""Clock offset in seconds that is worth a note: more than any network's delay. Guess: clock offsets of
healthy peers."""
NO_INVITE = "Ask the run's author for an invite link: p2ptrain invite RUN"
SLOW_BYTES_S = 64_000.0
"""Rate in bytes per second below which the line counts as slow: half a Mbit/s. At this rate a model of 15 million
parameters takes four minutes, each way. Guess: the rate at which exchanges start to fail."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One node's view of this machine."""

    sight: ReachabilityReport
    clock_ahead_s: float = 0.0
    """Seconds by which our clock is ahead of the node's."""
    sent_from: int = 0
    """Local port of our connection to the node; 0: unknown."""


def admission(policy: str, me: PeerId | None, why: Refusal | None, invite: str) -> Finding:
    """Report whether the run admits this peer, or ``why`` not; ``me`` is None if the home has no identity yet."""
    if policy == "open":
        return ok("admission", "the run is open: anyone with its link may join")
    if me is not None and why is None:
        return ok("admission", f"the run admits {short(me)} ({policy})")
    if policy == "invite" and invite and why is not Refusal.BANNED:
        return ok("admission", "the run admits invited peers, and the link has an invite, which is checked on joining")
    if me is None and policy == "allowlist":
        words = "the run admits peers on its author's list, and this one has no peer id yet"
        return note(
            "admission", words, "Join once by the link; the error names the peer id that the author must admit."
        )
    if me is None:
        return bad("admission", "the run admits only invited peers, and the link has no invite", NO_INVITE)
    assert why is not None  # the case of None is handled above
    return bad("admission", f"the run does not admit {short(me)}: {why}", remedy(why, me))


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
    known = [each for each in far if each.sent_from]
    words = f"others see {', '.join(hosts)}, the address of a router"
    if known:
        keeps = all(address.port_of([each.sight.place]) == each.sent_from for each in known)
        words += " that keeps ports" if keeps else " that changes ports"
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


def path(examined: Mapping[str, PathVerdict], can_help: bool) -> Finding:
    """Report whether paths carry packets of this machine's MTU, by host.

    Args:
        can_help: whether a peer could let routers fragment its packets.
    """
    if not examined:
        return skipped("path", "no node could be dialed directly to examine the path to it")
    narrow = {host: verdict for host, verdict in examined.items() if verdict.is_narrow}
    if not narrow:
        return ok("path", f"large packets reach {_nodes(len(examined))}")
    words = f"large packets to {', '.join(narrow)} are lost in silence: the path's MTU is smaller, and ICMP is blocked"
    lasting, both_ways = remedies()
    fix = f"Let the kernel find the path's MTU: {lasting}. If others' packets are lost, too: {both_ways}"
    if can_help and all(verdict.fragments_pass for verdict in narrow.values()):
        return note("path", f"{words}; a peer works, since routers on it may fragment what it sends", fix)
    return bad("path", words, fix)


def rates(measured: Sequence[tuple[str, float, float]]) -> Finding:
    """Report the best rates from tuples of node name and bytes per second in and out."""
    if not measured:
        return skipped("rates", "no node was available to measure with")
    down, up = max(each[1] for each in measured), max(each[2] for each in measured)
    words = f"{size(down)}/s in, {size(up)}/s out, the best of {_nodes(len(measured))}"
    if min(down, up) < SLOW_BYTES_S:
        return note(
            "rates", words, "Exchanges will take long. Close other programs that use the connection, or use a cable."
        )
    return ok("rates", words)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
