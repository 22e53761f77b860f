"""One node's knowledge about admission. Has state but no I/O: time and bytes are arguments."""

from __future__ import annotations

from p2ptrain.admission.check import Refusal, refusal
from p2ptrain.admission.records import AccessList, Certificate
from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId, RunId

MAX_REMEMBERED = 4096
"""Certificates kept: twice the number of records that the DHT's validator accepts."""


class Gate:
    """Admission state of one node in a run that is not open. Used on the network's event loop only.

    Args:
        policy: ``admission.policy`` of the manifest.
        run: id of the run.
        author: the run's public key, 32 bytes.
        certificate: our own certificate, encoded; empty without one.
        access_list: the last known access list; None without one.
    """

    def __init__(
        self, policy: str, run: RunId, author: bytes, certificate: bytes = b"", access_list: AccessList | None = None
    ) -> None:
        self.policy = policy
        self.run = run
        self.author = author
        self.certificate = certificate
        self.access_list = access_list or AccessList()
        self._certificates: BoundedDict[PeerId, Certificate] = BoundedDict(MAX_REMEMBERED)

    def refusal(self, peer: PeerId, shown: bytes, now: float) -> Refusal | None:
        """Return why a peer that shows this certificate (empty: none) is refused, or None.

        Keeps a valid certificate.
        """
        known = self._certificates.get(peer)
        certificate = known if known is not None and known.encode() == shown else None
        if certificate is None and shown and self.policy == "invite":
            try:
                certificate = Certificate.decode(shown, self.run, self.author)
            except RemoteError:
                return refusal(self.policy, self.access_list, peer, None, now) and Refusal.NOT_GENUINE
        why = refusal(self.policy, self.access_list, peer, certificate, now)
        if why is None and certificate is not None:
            self._certificates[peer] = certificate
        return why

    def counts(self, peer: PeerId, now: float) -> bool:
        """Return whether a peer is a member, by the last certificate that it showed to us or in the DHT."""
        return refusal(self.policy, self.access_list, peer, self._certificates.get(peer), now) is None

    def take(self, encoded: bytes) -> bool:
        """Accept an access list from any source; return whether it is newer than ours. Raises RemoteError if forged."""
        access_list = AccessList.decode(encoded, self.run, self.author)
        if access_list.serial <= self.access_list.serial:
            return False
        self.access_list = access_list
        return True
