"""The register of an invite issuer: which peers used which invite."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.admission.check import Refusal
from p2ptrain.admission.records import AccessList, Invite, attest, is_introduced
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.statements import Sign

MAX_INVITES = 1000
"""Valid invites in use; a further one is refused until one expires. Guess: count the invites of real runs."""


@dataclass(slots=True)
class InviteRegister:
    """Uses of invites. The register must be on disk before a response is sent, or a crash loses a use."""

    run: RunId
    me: PeerId
    guests: dict[bytes, dict[PeerId, int]] = field(default_factory=dict)
    """The invited peers and their times of admission, in seconds since 1970, by the invite's key."""
    expiries: dict[bytes, int] = field(default_factory=dict)
    """End of each invite in seconds since 1970, by the invite's key."""

    def admit(
        self, invite: Invite, peer: PeerId, introduction: bytes, access_list: AccessList, now: float, sign: Sign
    ) -> tuple[int, bytes] | Refusal:
        """Attest the admission of a peer, or return why not. Repeated requests get the same answer."""
        if self.me != invite.issuer or not is_introduced(invite, self.run, peer, introduction):
            return Refusal.NOT_GENUINE
        if peer in access_list.banned:
            return Refusal.BANNED
        if invite.id in access_list.revoked:
            return Refusal.REVOKED
        if now > invite.expires_at:
            return Refusal.LATE
        self._forget(now)
        guests = self.guests.get(invite.key, {})
        if peer not in guests and len(guests) >= invite.uses:
            return Refusal.USED_UP
        if invite.key not in self.guests and len(self.guests) >= MAX_INVITES:
            return Refusal.NO_ROOM
        at = guests.setdefault(peer, int(now))
        self.guests[invite.key] = guests
        self.expiries[invite.key] = invite.expires_at
        return at, attest(sign, self.run, invite, peer, at)

    def encode(self) -> bytes:
        rows = {key.hex(): [self.expiries[key], guests] for key, guests in self.guests.items()}
        return json.dumps({"run": self.run, "invites": rows}, indent=1).encode()

    @classmethod
    def decode(cls, body: bytes, run: RunId, me: PeerId) -> InviteRegister:
        """Decode a register from our own file. Raises ValueError if it is damaged or of another run."""
        register = cls(run, me)
        try:
            document: Any = json.loads(body)
            if document["run"] != run:
                raise ValueError("it belongs to another run")
            for key, (expires_at, guests) in document["invites"].items():
                register.expiries[bytes.fromhex(key)] = int(expires_at)
                register.guests[bytes.fromhex(key)] = {PeerId(str(peer)): int(at) for peer, at in guests.items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__})") from None
        return register

    def _forget(self, now: float) -> None:
        for key in [key for key, expires_at in self.expiries.items() if expires_at < now]:
            del self.expiries[key], self.guests[key]
