"""The join link: one token to copy, ``p2ptrain://<RunId>@<multiaddr>[,<multiaddr>…][#<invite>]``.

It names the run by the digest of its manifest and some peers or bootstraps to ask first. Where a run takes invited
peers only, the author's link also carries an invite: base64url text, which ``p2ptrain.admission`` reads. Links travel
through chats and terminals that cut, wrap and decorate them, so a link is read strictly and each way of breaking it has
its own message.
Multiaddresses (https://multiformats.io/multiaddr) are taken in the forms that a peer can dial, over TCP, and only when
they end in a peer id::

    /ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>/p2p/<id>[/p2p-circuit/p2p/<id>]
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from p2ptrain.base.errors import JoinLinkError
from p2ptrain.base.ids import RunId, multihash
from p2ptrain.manifest.faults import shown

SCHEME = "p2ptrain://"
MAX_LINK_CHARACTERS = 4096
"""Guess: room for 16 addresses of relayed peers with long host names."""
MAX_INVITE_CHARACTERS = 1024
"""An invite with four witnesses has 620."""
MAX_ADDRESSES = 16
"""Guess: more than anyone dials before giving up."""

_COPY_AGAIN = "Copy the whole link again; it is one line without blanks, p2ptrain://<64 digits>@<address>,…"
_ASK_AUTHOR = "Ask for a new link: `p2ptrain bootstrap` and `p2ptrain invite` print them."
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")

# A peer id is a multihash: kind of digest, length, digest. Ed25519 keys are short enough to stand for themselves.
_PEER_ID_FORMS = ((b"\x00\x24\x08\x01\x12\x20", 38), (b"\x12\x20", 34))


@dataclass(frozen=True, slots=True)
class JoinLink:
    """A run and where to ask for it."""

    run_id: RunId
    addresses: tuple[str, ...]
    """Multiaddresses that end in a peer id, in the order in which to try them."""
    invite: str = field(default="", repr=False)
    """What lets the holder in, as text; empty where the link has none. A secret."""

    def __str__(self) -> str:
        invite = f"#{self.invite}" if self.invite else ""
        return f"{SCHEME}{self.run_id}@{','.join(self.addresses)}{invite}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a link. Raises JoinLinkError that says what is wrong with it."""
        link = text.strip()
        if len(link) > MAX_LINK_CHARACTERS:
            raise JoinLinkError(
                f"The link has {len(link):,} characters, and at most {MAX_LINK_CHARACTERS:,} are read.", _COPY_AGAIN
            )
        if "…" in link or "..." in link:
            raise JoinLinkError("The link is shortened: … stands for what was left out.", _COPY_AGAIN)
        if not link.startswith(SCHEME):
            raise JoinLinkError(f"A join link begins with {SCHEME}, and this is {shown(link)}.", _COPY_AGAIN)
        link, mark, invite = link.partition("#")
        if mark and not re.fullmatch(rf"[A-Za-z0-9_-]{{1,{MAX_INVITE_CHARACTERS}}}", invite):
            raise JoinLinkError(f"The link's invite is damaged, {len(invite):,} characters.", _COPY_AGAIN)
        digits, at, rest = link.removeprefix(SCHEME).partition("@")
        run = _run_id(digits)
        if not at or not rest:
            raise JoinLinkError("The link seems cut off: no address follows the run.", _COPY_AGAIN)
        addresses = tuple(rest.split(","))
        if len(addresses) > MAX_ADDRESSES:
            raise JoinLinkError(
                f"The link has {len(addresses)} addresses, and at most {MAX_ADDRESSES} are read.", _ASK_AUTHOR
            )
        for address in addresses:
            check_address(address)
        return cls(run, addresses, invite)


def _run_id(digits: str) -> RunId:
    if re.fullmatch(r"[0-9a-f]{64}", digits):
        return RunId(digits)
    if re.fullmatch(r"[0-9a-f]{0,63}", digits):
        raise JoinLinkError(f"The link seems cut off: its run has {len(digits)} of 64 digits.", _COPY_AGAIN)
    raise JoinLinkError(f"A run is named by 64 digits 0-9 a-f, and this link has {shown(digits)}.", _COPY_AGAIN)


def check_address(address: str) -> None:
    """Raise JoinLinkError unless ``address`` is a multiaddress that can be dialled and names its peer."""
    if not address:
        raise JoinLinkError("The link seems cut off: an address is empty.", _COPY_AGAIN)
    root, *parts = address.split("/")
    if root:
        raise JoinLinkError(f"An address begins with a slash, and this is {shown(address)}.", _ASK_AUTHOR)
    for index, expected in enumerate(_FORM):
        if index == len(parts):
            if index == _RELAY_BEGINS:
                return
            raise JoinLinkError(f"An address seems cut off: {shown(address)} ends before its peer id.", _COPY_AGAIN)
        fault = expected(parts[index], parts[index - 1])
        if fault:
            raise JoinLinkError(f"{fault}, in the address {shown(address)}.", _ASK_AUTHOR)
    if len(parts) > len(_FORM):
        raise JoinLinkError(f"{shown(parts[len(_FORM)])} follows the peer id, in {shown(address)}.", _ASK_AUTHOR)


def _host_kind_fault(part: str, _: str) -> str | None:
    return None if part in _HOST_CHECKS else f"{shown(part)} is none of {', '.join(_HOST_CHECKS)}"


def _host_fault(part: str, kind: str) -> str | None:
    return None if _HOST_CHECKS[kind](part) else f"{shown(part)} is no {kind} host"


def _port_fault(part: str, _: str) -> str | None:
    is_port = re.fullmatch(r"[1-9][0-9]{0,4}", part) and int(part) < 2**16
    return None if is_port else f"{shown(part)} is no port from 1 to 65535"


def _peer_id_fault(part: str, _: str) -> str | None:
    return None if is_peer_id(part) else f"{shown(part)} is no peer id (was the link cut off, or retyped?)"


def _literally(word: str) -> Callable[[str, str], str | None]:
    return lambda part, _: None if part == word else f"{shown(part)} stands where {word} belongs"


def is_peer_id(text: str) -> bool:
    """Whether ``text`` is a base58 multihash of the two kinds that libp2p makes from public keys."""
    decoded = multihash(text)
    if decoded is None:
        return False
    return any(decoded.startswith(head) and len(decoded) == size for head, size in _PEER_ID_FORMS)


def _is_ip4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_ip6(text: str) -> bool:
    try:
        return ipaddress.IPv6Address(text).scope_id is None
    except ValueError:
        return False


def _is_host_name(text: str) -> bool:
    return len(text) <= 253 and all(_HOST_LABEL.fullmatch(label) for label in text.split("."))


_HOST_CHECKS: dict[str, Callable[[str], bool]] = {
    "ip4": _is_ip4,
    "ip6": _is_ip6,
    "dns": _is_host_name,
    "dns4": _is_host_name,
    "dns6": _is_host_name,
}

# What may stand at each place between the slashes; each check sees its part and the one before it.
_FORM: tuple[Callable[[str, str], str | None], ...] = (
    _host_kind_fault,
    _host_fault,
    _literally("tcp"),
    _port_fault,
    _literally("p2p"),
    _peer_id_fault,
    _literally("p2p-circuit"),
    _literally("p2p"),
    _peer_id_fault,
)
_RELAY_BEGINS = 6  # An address may end here: the rest is the way through a relay.
