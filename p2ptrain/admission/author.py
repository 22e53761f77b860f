"""The author's commands invite, admit and revoke, on the files of the run's directory.

::

    RUN/run.key             signs invites and access lists (``p2ptrain.manifest.directory``)
    RUN/rulings.signed      the newest access list; not secret. The bootstrap notices a new one within seconds and
                            distributes it. A bootstrap on another machine needs a copy of this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.admission.records import (
    MAX_ACCESS_LIST_NAMES,
    MAX_USES,
    AccessList,
    Invite,
    InviteCredential,
)
from p2ptrain.base import files
from p2ptrain.base.errors import AdmissionError, RemoteError
from p2ptrain.base.ids import PeerId, RunId, key_of
from p2ptrain.base.text import LIFETIME_UNITS, command_line, lifetime_s
from p2ptrain.manifest import JoinLink, SignedManifest, load_run, read_key
from p2ptrain.statements import KEY_BYTES

ACCESS_LIST_FILE = "rulings.signed"
LINK_FILE = Path("bootstrap") / "join-link.txt"
"""Written into the run's directory by a bootstrap without --home."""
LONGEST_S = 365 * 86_400
"""Longest lifetime of an invite, one year. Short ones are better, since an invite is a secret in a chat."""

_OPEN = "Create a new run with p2ptrain init; set admission.policy to invite or allowlist before you sign it."


def load_access_list(path: Path, signed: SignedManifest) -> AccessList | None:
    """Read an access list; None if the file is missing. Raises AdmissionError if it is damaged or of another run."""
    try:
        return AccessList.decode(path.read_bytes(), signed.run_id, author_of(signed))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AdmissionError(f"{path} cannot be read: {error.strerror}.", files.remedy(error, "")) from error
    except RemoteError:
        raise AdmissionError(
            f"{path} is not an access list signed by this run's author.",
            "Restore the right file, or move this one away.",
        ) from None


def author_of(signed: SignedManifest) -> bytes:
    """Return the public key of the run's author, 32 bytes."""
    return bytes.fromhex(signed.manifest.run.public_key)


def invite(run: Path, link: JoinLink, lifetime_s: int, uses: int, now: float) -> tuple[JoinLink, Invite]:
    """Make a join link with an invite, and return both. The first node of the given link becomes the issuer.

    Args:
        run: the run's directory.
        link: the run's link without an invite.
        lifetime_s: seconds for which the invite is valid.
        uses: number of peers that it brings in.
        now: seconds since 1970.

    Raises AdmissionError and ManifestError.
    """
    signed = _gated(run)
    if signed.manifest.admission.policy != "invite":
        raise AdmissionError(
            f"The run in {run} has policy allowlist, which takes no invites.",
            f"Admit each peer: {command_line('p2ptrain', 'admit', run)} PEER_ID",
        )
    check_link(run, signed, link)
    if not 1 <= uses <= MAX_USES:
        raise AdmissionError(f"An invite brings in 1 to {MAX_USES:,} peers, not {uses}.", "Choose another --uses.")
    issuer = _peer(link.addresses[0].rpartition("/p2p/")[2])
    key = Ed25519PrivateKey.from_private_bytes(os.urandom(KEY_BYTES))
    blank = Invite(key.public_key().public_bytes_raw(), int(now) + lifetime_s, uses, issuer)
    issued = blank.signed(signed.run_id, read_key(run))
    return JoinLink(link.run_id, link.addresses, str(InviteCredential(issued, key.private_bytes_raw()))), issued


def printed_link(run: Path) -> JoinLink:
    """Read the link that the run's bootstrap printed last. Raises AdmissionError and JoinLinkError."""
    path = run / LINK_FILE
    try:
        return JoinLink.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdmissionError(
            f"No bootstrap of the run in {run} has printed a link here.",
            f"Start it with {command_line('p2ptrain', 'bootstrap', run)}, or give its link with --link.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise AdmissionError(f"{path} cannot be read: {files.cause(error)}.", "Give the link with --link.") from error


def check_link(run: Path, signed: SignedManifest, link: JoinLink) -> None:
    """Raise AdmissionError if the link belongs to another run than the directory."""
    if link.run_id != signed.run_id:
        raise AdmissionError(
            f"The link belongs to run {link.run_id[:12]}…, but {run} holds run {signed.run_id[:12]}….",
            "Use --link with the link that this run's bootstrap printed.",
        )


def seconds(text: str) -> int:
    """Convert ``30m``, ``12h`` or ``7d`` to seconds. Raises AdmissionError."""
    span = lifetime_s(text)
    if not 0 < span <= LONGEST_S:
        raise AdmissionError(
            f"{text[:40]!r} is not a valid lifetime of an invite.", f"Write it like {LIFETIME_UNITS}, at most 365d."
        )
    return span


def admit(run: Path, names: Sequence[str], now: float) -> AccessList:
    """Admit these peers, and lift their bans. Raises AdmissionError and ManifestError."""
    signed = _gated(run)
    peers = {_peer(each) for each in names}
    before = load_access_list(run / ACCESS_LIST_FILE, signed) or AccessList()
    return _rule(run, signed.run_id, before, peers | {*before.admitted}, {*before.banned} - peers, before.revoked, now)


def revoke(run: Path, names: Sequence[str], now: float) -> AccessList:
    """Ban peers, and revoke invites with all certificates based on them. Raises AdmissionError and ManifestError."""
    signed = _gated(run)
    invites = {each for each in names if len(each) == 16 and set(each) <= set("0123456789abcdef")}
    peers = {_peer(each) for each in names if each not in invites}
    before = load_access_list(run / ACCESS_LIST_FILE, signed) or AccessList()
    admitted, banned = {*before.admitted} - peers, peers | {*before.banned}
    return _rule(run, signed.run_id, before, admitted, banned, {*before.revoked} | invites, now)


def _rule(
    run: Path,
    run_id: RunId,
    before: AccessList,
    admitted: Iterable[PeerId],
    banned: Iterable[PeerId],
    revoked: Iterable[str],
    now: float,
) -> AccessList:
    """Write a new access list, or leave the file unchanged if the names are the same."""
    names = tuple(sorted(admitted)), tuple(sorted(banned)), tuple(sorted(revoked))
    if names == (before.admitted, before.banned, before.revoked):
        return before
    serial = max(before.serial + 1, int(now))
    try:
        access_list = AccessList(serial, int(now), *names).signed(run_id, read_key(run))
    except ValueError:
        raise AdmissionError(
            f"The access list would have {sum(map(len, names)):,} names, but at most {MAX_ACCESS_LIST_NAMES:,} are"
            " allowed.",
            "Create an open run for any number of peers.",
        ) from None
    path = run / ACCESS_LIST_FILE
    try:
        files.replace(path, access_list.encode())
    except OSError as error:
        raise AdmissionError(f"{path} cannot be written: {error.strerror}.", files.remedy(error, "")) from error
    return access_list


def _gated(run: Path) -> SignedManifest:
    signed = load_run(run)
    if signed.manifest.admission.policy == "open":
        raise AdmissionError(f"The run in {run} is open: it admits every peer that has its link.", _OPEN)
    return signed


def _peer(text: str) -> PeerId:
    if key_of(text) is None:
        raise AdmissionError(
            f"{text[:80]!r} is not a peer id.",
            "Give the id that a refused peer prints, 12D3KooW… with 52 characters; an invite's id has 16 digits.",
        )
    return PeerId(text)
