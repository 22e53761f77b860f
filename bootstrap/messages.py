"""What the bootstrap tells its owner: pure functions from records and addresses to lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from p2ptrain.base.errors import JoinLinkError, UserError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.manifest import JoinLink
from p2ptrain.net import address
from p2ptrain.swarm.messages import PeerState, Presence

MOST_NAMED = 8
"""Peers named in a status line; the others are counted."""

View = Mapping[PeerId, Presence]
"""The live peers, each with its newest record."""

Say = Callable[[str, str], None]
"""Show one line: its tag and its text."""


def link_addresses(addresses: Sequence[str], announced: Sequence[str], local: bool) -> tuple[str, ...]:
    """What goes into the join link: what the owner announces, else the one address that others reach best.

    Raises:
        UserError: no other machine could use any of them.
    """
    if announced:
        wanted = [each for each in announced if address.reachable_address([each], local)]
    else:
        best = address.reachable_address(addresses, local)
        wanted = [] if best is None else [best]
    if not wanted:
        found = ", ".join(address.host_port(each) for each in announced or addresses) or "none"
        raise UserError(
            f"No other machine can reach this one at any address of ours (found: {found}).",
            "Connect it to a network; where that has IPv6 and no IPv4, start with --listen /ip6/::/tcp/31337. Or name"
            " the address that others use with --announce /ip4/PUBLIC_IP/tcp/PORT; for a swarm on this machine alone"
            " add --local.",
        )
    return tuple(wanted)


def check_beside(link: JoinLink, me: PeerId, own: Sequence[str], home: Path) -> None:
    """Raise JoinLinkError where the other bootstrap's link names us at an address that is not ours, or nobody but us.

    Whoever copies a run's directory to a second machine copies the first one's identity with it. Two nodes of one name
    never meet, and whoever dials one of them may be led to the other.

    Args:
        own: what our own link holds. A link that names these beside others' is one that the others made with ours.
    """
    named = [each for each in link.addresses if address.split_peer(each)[1] == me]
    elsewhere = [each for each in named if each not in own]
    if not elsewhere and len(named) < len(link.addresses):
        return
    where = address.host_port((elsewhere or named)[0])
    raise JoinLinkError(
        f"The link of the other bootstrap names this one itself, {short(me)}, at {where}.",
        "Each bootstrap has an identity of its own. If this directory is a copy of the other one's, delete"
        f" {home} and keep manifest.signed alone (and rulings.signed, if there is one). If it is the first one and its"
        " address has changed, leave --beside out.",
    )


def join_lines(link: JoinLink, local: bool, contained: bool = False) -> list[str]:
    """The command to pass on, and how far it reaches.

    Args:
        contained: we run in a container, whose port its engine may publish.
    """
    command = f"p2ptrain peer '{link}'"
    if local:
        why = "This swarm lives on this machine alone (--local)."
        return [f"{command} --local", why]
    if any(address.is_public(each) for each in link.addresses):
        return [command]
    port = address.split_peer(link.addresses[0])[0].split("/")[4]
    if contained:
        why = (
            "This address works in containers of the same network, and on Linux on the computer that they run on. To"
            f" let others in, publish the port (-p {port}:{port}) and start again with"
            f" --announce /ip4/THAT_COMPUTERS_IP/tcp/{port}"
        )
        return [command, why]
    why = (
        "This address works inside your own network only. To be reached from the internet, forward TCP port "
        f"{port} of your router to this machine and start again with --announce /ip4/PUBLIC_IP/tcp/{port}"
    )
    return [command, why]


def living(records: Sequence[Presence]) -> View:
    """The records of peers that are here and mean to stay."""
    return {record.peer: record for record in records if record.state is not PeerState.LEAVING}


def news(before: View, now: View, tokens_per_peer: int) -> list[str]:
    """One line for each peer that came, went or changed its state."""
    came = [f"{name(now[peer])} came: {doing(now[peer], tokens_per_peer)}" for peer in now if peer not in before]
    changed = [
        f"{name(now[peer])} is {doing(now[peer], tokens_per_peer)}"
        for peer in now
        if peer in before and before[peer].state is not now[peer].state
    ]
    left = [f"{name(before[peer])} left" for peer in before if peer not in now]
    return came + changed + left


def status_line(now: View, tokens_per_peer: int, size: int = 0) -> str:
    """Who is here and how far they are. ``size``: these are a sample of about so many peers; 0: they are all."""
    if not now:
        return "nobody is here; training starts when the first peer joins"
    named = [f"{name(record)} {doing(record, tokens_per_peer)}" for record in list(now.values())[:MOST_NAMED]]
    if size:
        return f"about {size} here, among them: {'; '.join(named)}"
    others = [f"{len(now) - MOST_NAMED} more"] if len(now) > MOST_NAMED else []
    return f"{len(now)} here: {'; '.join(named + others)}"


def name(record: Presence) -> str:
    """What people call a peer. The nickname came from a stranger: nothing in it may steer a terminal."""
    nickname = "".join(letter for letter in record.nickname if letter.isprintable()).strip()
    return f"{nickname} ({short(record.peer)})" if nickname else short(record.peer)


def doing(record: Presence, tokens_per_peer: int) -> str:
    """``training, step 12, 34 %``."""
    return f"{record.state}, step {record.step}, {100 * record.progress / tokens_per_peer:.0f} %"
