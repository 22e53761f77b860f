"""Lines that the bootstrap prints for its owner: pure functions of records and addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from p2ptrain.admission.author import ACCESS_LIST_FILE
from p2ptrain.base.errors import JoinLinkError, UserError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.data.file_store import FILES_FOLDER
from p2ptrain.data.unfinished import SHARDS_FOLDER
from p2ptrain.manifest import SIGNED_FILE, JoinLink
from p2ptrain.net import address, interfaces
from p2ptrain.swarm.messages import PeerState, Presence

MAX_NAMED = 8
COPIED = f"{SIGNED_FILE}, {FILES_FOLDER}, {SHARDS_FOLDER} and, if there is one, {ACCESS_LIST_FILE}"
"""What a second bootstrap of the run needs of the run's directory."""

View = Mapping[PeerId, Presence]
"""Live peers, each with its newest record."""

Say = Callable[[str, str], None]
"""Function that prints one line, given its tag and text."""


def link_addresses(addresses: Sequence[str], announced: Sequence[str], local: bool) -> tuple[str, ...]:
    """Return the addresses for the join link: the owner's, else our best one of IPv4 and of IPv6.

    Raises UserError if others reach none.
    """
    if announced:
        wanted = [each for each in announced if interfaces.announceable([each], local)]
    else:
        wanted = address.best_of_each_family(interfaces.announceable(addresses, local))
    if not wanted:
        found = ", ".join(address.host_port(each) for each in announced or addresses) or "none"
        raise UserError(
            f"No other machine can reach this one at any of its addresses (found: {found}).",
            "Connect it to a network. Or name the address that others use with --announce /ip4/PUBLIC_IP/tcp/PORT; for"
            " a swarm on this machine only, add --local.",
        )
    return tuple(wanted)


def check_beside(link: JoinLink, me: PeerId, own: Sequence[str], home: Path) -> None:
    """Raise JoinLinkError if another bootstrap's link names us at an address that is not in ``own``, or names only us.

    A run's directory that was copied to a second machine contains the first one's identity. Two nodes with the same
    identity never connect, and a dial to one of them may reach the other.
    """
    named = [each for each in link.addresses if address.split_peer(each)[1] == me]
    elsewhere = [each for each in named if each not in own]
    if not elsewhere and len(named) < len(link.addresses):
        return
    where = address.host_port((elsewhere or named)[0])
    raise JoinLinkError(
        f"The link of the other bootstrap names this one itself, {short(me)}, at {where}.",
        "Give each bootstrap an identity of its own: if this directory is a copy of the other one's, delete"
        f" {home} and keep {COPIED}. If this bootstrap is the first one and its address has changed, omit --beside.",
    )


def join_lines(link: JoinLink, local: bool, contained: bool = False) -> list[str]:
    """Return the command for others to join, and a note if the internet cannot reach us.

    ``contained``: whether we run in a container, whose engine may publish the port.
    """
    command = f"p2ptrain peer '{link}'"
    if local:
        return [f"{command} --local", "This swarm runs on this machine only (--local)."]
    public = {address.family_of(each) for each in link.addresses if address.is_public(each)}
    if public and public != {6}:
        return [command]
    port = address.port_of(link.addresses)
    if contained:
        why = (
            "This address works in containers of the same network, and on Linux on their host. To let others in,"
            f" publish the port (-p {port}:{port}) and start again with --announce /ip4/THAT_COMPUTERS_IP/tcp/{port}"
        )
    else:
        why = (
            "This address works inside your own network only. To let others in from the internet, forward TCP port"
            f" {port} of your router to this machine and start again with --announce /ip4/PUBLIC_IP/tcp/{port}"
        )
    if public:  # the private IPv4 address is for our own network
        why = f"Computers without IPv6 cannot join from the internet. {why.partition('. ')[2]}"
    return [command, why]


def living(records: Sequence[Presence]) -> View:
    return {record.peer: record for record in records if record.state is not PeerState.LEAVING}


def news(before: View, now: View, run_tokens: int) -> list[str]:
    """Return one line for each peer that joined, left or changed its state."""
    states = {peer: record.state for peer, record in before.items()}
    said = {peer: doing(record, run_tokens) for peer, record in now.items()}
    came = [f"{name(now[peer])} came: {said[peer]}" for peer in now if peer not in states]
    changed = [f"{name(now[peer])} is {said[peer]}" for peer in now if states.get(peer) not in (None, now[peer].state)]
    left = [f"{name(before[peer])} left" for peer in before if peer not in now]
    return came + changed + left


def status_line(now: View, run_tokens: int, size: int = 0) -> str:
    """Return a line with the live peers and their progress; ``size`` peers of which they are a sample, 0 if all."""
    if not now:
        return "nobody is here; training starts when the first peer joins"
    named = [f"{name(record)} {doing(record, run_tokens)}" for record in list(now.values())[:MAX_NAMED]]
    if size:
        return f"about {size:,} here, among them: {'; '.join(named)}"
    others = [f"{len(now) - MAX_NAMED:,} more"] if len(now) > MAX_NAMED else []
    return f"{len(now):,} here: {'; '.join(named + others)}"


def name(record: Presence) -> str:
    """Return a peer's name for people, without characters of its nickname that could control the terminal."""
    nickname = "".join(letter for letter in record.nickname if letter.isprintable()).strip()
    return f"{nickname} ({short(record.peer)})" if nickname else short(record.peer)


def doing(record: Presence, run_tokens: int) -> str:
    """Return a peer's state and progress: ``training, step 12, 34 %``."""
    percent = min(100 * record.progress / run_tokens, 100.0)  # the last inner phase may end beyond the budget
    return f"{record.state}, step {record.step:,}, {percent:.0f} %"
