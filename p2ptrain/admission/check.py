"""The admission decision: a list of checks in a fixed order."""

from __future__ import annotations

from enum import StrEnum

from p2ptrain.admission.records import AccessList, Certificate
from p2ptrain.base.clock import CLOCK_SKEW_S
from p2ptrain.base.ids import PeerId


class Refusal(StrEnum):
    """The reason for a refusal, for the refused peer's owner. Part of the wire protocol: ASCII, at most 64 bytes."""

    BANNED = "the run's author has banned this peer"
    NOT_LISTED = "this peer is not on the run's list"
    NO_INVITE = "this peer shows no invite"
    NOT_GENUINE = "its membership certificate is invalid"
    AHEAD = "its certificate is dated in the future; check the clock"
    LATE = "its invite had run out before it came"
    REVOKED = "the run's author has revoked the invite it came by"
    USED_UP = "its invite is used up"
    NO_ROOM = "the bootstrap that issued its invite has no room for more peers"


def refusal(
    policy: str, access_list: AccessList, peer: PeerId, certificate: Certificate | None, now: float
) -> Refusal | None:
    """Return why a peer is refused, or None if it is admitted. The first failed check decides.

    Args:
        policy: ``admission.policy`` of the manifest.
        access_list: the newest known access list; an empty one if the author never signed one.
        peer: the peer to check.
        certificate: the certificate that the peer shows, with verified signatures; it may belong to another peer.
        now: seconds since 1970.
    """
    if policy == "open":
        return None
    if peer in access_list.banned:
        return Refusal.BANNED
    if peer in access_list.admitted:
        return None
    if policy == "allowlist":
        return Refusal.NOT_LISTED
    if certificate is None:
        return Refusal.NO_INVITE
    if certificate.peer != peer:
        return Refusal.NOT_GENUINE
    if certificate.witnessed_at > now + CLOCK_SKEW_S:
        return Refusal.AHEAD
    if certificate.witnessed_at > certificate.invite.expires_at:
        return Refusal.LATE
    if certificate.invite.id in access_list.revoked:
        return Refusal.REVOKED
    return None


def remedy(why: Refusal, peer: PeerId) -> str:
    """Return what the owner of the refused peer can do."""
    match why:
        case Refusal.NOT_LISTED:
            return f"Ask the run's author to admit this peer: p2ptrain admit RUN {peer}"
        case Refusal.BANNED:
            return "Ask the run's author why; nobody else can lift the ban."
        case Refusal.NO_ROOM:
            return (
                "Ask the run's author for an invite from another bootstrap, or to admit this peer:"
                f" p2ptrain admit RUN {peer}"
            )
        case Refusal.AHEAD:
            return "Check this computer's clock with p2ptrain doctor LINK; if it is right, tell the run's author."
        case _:
            return (
                "Ask the run's author for an invite link, and join with it and the same --home; or to admit this peer:"
                f" p2ptrain admit RUN {peer}"
            )
