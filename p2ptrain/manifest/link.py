"""The join link: one token to copy, ``p2ptrain://<RunId>@<multiaddr>[,<multiaddr>…][#<invite>]``.

A link names a run by the digest of its manifest, and peers or bootstraps to ask first. In a run for invited peers the
author's link also carries an invite: base64url text, which ``p2ptrain.admission`` reads. Chats, mail programs and
terminals wrap, quote and decorate links, which ``JoinLink.parse`` undoes. Then a link is parsed strictly, with a
separate message for each kind of damage.

Multiaddresses (https://multiformats.io/multiaddr) must use TCP, have a form that a peer can dial, and end in a peer
id::

    /ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>/p2p/<id>[/p2p-circuit/p2p/<id>]
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass, field
from typing import Self

from p2ptrain.base.errors import JoinLinkError
from p2ptrain.base.ids import RunId, multihash
from p2ptrain.manifest.faults import shown

SCHEME = "p2ptrain://"
MAX_LINK_CHARACTERS = 4096
"""Longest link: 16 addresses of relayed peers with long host names. Guess: measure real links."""
MAX_TEXT_CHARACTERS = 4 * MAX_LINK_CHARACTERS
"""Longest text around a link. Guess: the longest messages that people paste."""
MAX_INVITE_CHARACTERS = 1024
"""Longest invite; usual ones have 262 characters."""
MAX_ADDRESSES = 16
"""Most addresses in a link. Guess: count the addresses that peers dial before they join or give up."""

_COPY_AGAIN = "Copy the whole link again; it is one line without blanks, p2ptrain://<64 digits>@<address>,…"
_MAIL_QUOTES = re.compile(r"^[ \t]*>[> \t]*", re.MULTILINE)
_BREAK = re.compile(r"=?[\s\u00ad\u200b\u2060\ufeff]+")
"""Space and invisible characters; the equals sign is a soft line break of quoted-printable text (RFC 2045, 6.7)."""
_END = re.compile(r"""['"`<>()\]}|\u00ab\u00bb\u2018-\u201f]|\s--|\n[ \t]*\r?\n""")
"""End of a link within other text: a quote or bracket, an option, an empty line."""
_ASK_AUTHOR = "Ask for a new link: `p2ptrain bootstrap` and `p2ptrain invite` print them."
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")

_FORM = "/ip4/HOST/tcp/PORT/p2p/PEER, or with ip6, dns, dns4, dns6, or /p2p-circuit/p2p/PEER after it"
_ADDRESS = re.compile(
    "/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>[1-9][0-9]{0,4})/p2p/(?P<peer>[^/]+)"
    "(?:/p2p-circuit/p2p/(?P<relayed>[^/]+))?"
)

# A peer id is a multihash: kind of digest, length, digest. Short Ed25519 keys are included instead of a digest.
_PEER_ID_FORMS = ((b"\x00\x24\x08\x01\x12\x20", 38), (b"\x12\x20", 34))


@dataclass(frozen=True, slots=True)
class JoinLink:
    """A run and the addresses at which to ask for it."""

    run_id: RunId
    addresses: tuple[str, ...]
    """Multiaddresses that end in a peer id, in the order of attempts."""
    invite: str = field(default="", repr=False)
    """The invite credential as text, a secret; empty if the link has none."""

    def __str__(self) -> str:
        invite = f"#{self.invite}" if self.invite else ""
        return f"{SCHEME}{self.run_id}@{','.join(self.addresses)}{invite}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a link, with whatever mail programs, shells and people put around and into it.

        Mail quoting, line breaks, spaces, quotes, brackets, the join command and other text are ignored. Raises
        JoinLinkError that names the damage.
        """
        candidates = _candidates(text)
        for each in candidates[:-1]:
            with contextlib.suppress(JoinLinkError):
                return cls._parse(each)
        return cls._parse(candidates[-1])

    @classmethod
    def _parse(cls, link: str) -> Self:
        if len(link) > MAX_LINK_CHARACTERS:
            raise JoinLinkError(
                f"The link has {len(link):,} characters, but at most {MAX_LINK_CHARACTERS:,} are allowed.", _COPY_AGAIN
            )
        if "…" in link or "..." in link:
            raise JoinLinkError("The link is shortened: … stands for what was left out.", _COPY_AGAIN)
        if not link.startswith(SCHEME):
            raise JoinLinkError(f"A join link begins with {SCHEME}, but this is {shown(link)}.", _COPY_AGAIN)
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
                f"The link has {len(addresses)} addresses, but at most {MAX_ADDRESSES} are allowed.", _ASK_AUTHOR
            )
        for address in addresses:
            check_address(address)
        return cls(run, addresses, invite)


def _candidates(text: str) -> list[str]:
    """Return what may be the link in a text, longest first, and last what an error should be about: the longest again.

    A space may be a break in the link or its end, so that the longest candidate that is a link is the right one. A link
    does not end before a piece that continues it, however damaged: another address, a circuit or an invite.
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        return [text]
    unquoted = _MAIL_QUOTES.sub("", text)
    begin = unquoted.find(SCHEME)
    if begin < 0:
        return [text.strip()]
    end = _END.search(unquoted, begin)
    pieces = _BREAK.split(unquoted[begin : end.start() if end else None].strip())
    longest = "".join(pieces)
    ends = [count for count in range(len(pieces) - 1, 0, -1) if not pieces[count].startswith((",", "/", "#"))]
    shorter = ("".join(pieces[:count]).rstrip(".,;:!?") for count in ends)
    return [longest.rstrip(".;:!?"), *(each for each in shorter if len(each) <= MAX_LINK_CHARACTERS), longest]


def _run_id(digits: str) -> RunId:
    if re.fullmatch(r"[0-9a-f]{64}", digits):
        return RunId(digits)
    if re.fullmatch(r"[0-9a-f]{0,63}", digits):
        raise JoinLinkError(f"The link seems cut off: its run id has {len(digits)} of 64 digits.", _COPY_AGAIN)
    raise JoinLinkError(f"A run id has 64 digits 0-9 a-f, but this link has {shown(digits)}.", _COPY_AGAIN)


def check_address(address: str) -> None:
    """Raise JoinLinkError unless ``address`` is a multiaddress that can be dialed and ends in a peer id."""
    if not address:
        raise JoinLinkError("The link seems cut off: an address is empty.", _COPY_AGAIN)
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise JoinLinkError(
            f"The address {shown(address)} is cut off or damaged; its form is {_FORM}.", f"{_COPY_AGAIN} {_ASK_AUTHOR}"
        )
    if not _is_host(found["kind"], found["host"]):
        raise JoinLinkError(f"{shown(found['host'])} is not a valid {found['kind']} host.", _ASK_AUTHOR)
    if int(found["port"]) >= 2**16:
        raise JoinLinkError(f"{found['port']} is not a port from 1 to 65535, in {shown(address)}.", _ASK_AUTHOR)
    for peer in filter(None, (found["peer"], found["relayed"])):
        if not is_peer_id(peer):
            raise JoinLinkError(
                f"{shown(peer)} is not a peer id (was the link cut off or retyped?), in {shown(address)}.", _ASK_AUTHOR
            )


def is_peer_id(text: str) -> bool:
    """Return whether ``text`` is a base58 multihash of one of the two kinds that libp2p makes from public keys."""
    decoded = multihash(text)
    if decoded is None:
        return False
    return any(decoded.startswith(head) and len(decoded) == size for head, size in _PEER_ID_FORMS)


def _is_host(kind: str, text: str) -> bool:
    if kind.startswith("dns"):
        return len(text) <= 253 and all(_HOST_LABEL.fullmatch(label) for label in text.split("."))
    try:
        return ipaddress.ip_address(text).version == int(kind[-1]) and "%" not in text  # %: a zone of this machine
    except ValueError:
        return False
