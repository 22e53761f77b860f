"""Admission of a peer to a run that does not admit everybody: its certificate, the access list and its gate.

::

    HOME/badge             this peer's membership certificate; kept, because an invite can be used only once
    HOME/rulings.signed    the newest access list seen, so that a silent DHT does not lift a ban

In an open run this module does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from p2ptrain.admission import Gate, InviteCredential, Refusal, remedy
from p2ptrain.admission.author import ACCESS_LIST_FILE, author_of, load_access_list
from p2ptrain.base import files
from p2ptrain.base.backoff import PAUSE_S, backoff
from p2ptrain.base.clock import CLOCK_SKEW_S, steady, wall
from p2ptrain.base.errors import AdmissionError, HomeError, NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net.access_list_store import AccessListStore
from p2ptrain.net.admission_service import ADMISSION_PROTOCOL, LIMITS, AdmissionHandler, ask_access_list, come_in
from p2ptrain.net.gate import GatedTransport
from p2ptrain.net.identity import verify
from p2ptrain.ports import Link, Notebook, Transport
from p2ptrain.swarm import PRESENCE_LIFETIME_S, Presence
from peer.home import Home
from peer.network import Connection

CERTIFICATE_FILE = "badge"
MAX_ASKED = 4
"""Nodes that a peer that is not admitted asks for the access list, bootstraps first; a dead one costs ten seconds.
Guess: how often the first nodes are gone or outdated."""
_CURED_BY_INVITE = (Refusal.NO_INVITE, Refusal.NOT_GENUINE, Refusal.LATE, Refusal.REVOKED)


class AdmissionClient:
    """Admission of one peer to one run. ``gate`` is None if the run is open.

    ``enter`` runs before anything else of the run, ``update`` for as long as the peer runs.
    """

    def __init__(
        self, connection: Connection, home: Home, signed: SignedManifest, me: PeerId, notebook: Notebook
    ) -> None:
        self._connection = connection
        self._home = home
        self._signed = signed
        self._me = me
        self._notebook = notebook
        self._refusal: Refusal | None = None
        self.gate = gate_of(home, signed)

    def transport(self, over: Transport | None = None, checks_responder: bool = True) -> Transport:
        """Return a transport for members only: ``over``, or the connection's exchanges if it is None.

        Args:
            checks_responder: as for ``GatedTransport``.
        """
        plain = self._connection if over is None else over
        if self.gate is None:
            return plain
        return GatedTransport(plain, self.gate, self._me, self._notebook, checks_responder=checks_responder)

    def guarded(self, handler: Callable[[Link], Awaitable[None]]) -> Callable[[Link], Awaitable[None]]:
        """Restrict a handler of inbound links to members, as every protocol that serves weights must."""
        if self.gate is None:
            return handler
        return GatedTransport(self._connection, self.gate, self._me, self._notebook).guarded(handler)

    def counts(self, peer: PeerId) -> bool:
        """Return whether a peer is admitted, by the certificate that it showed and the newest access list."""
        return self.gate is None or self.gate.counts(peer, wall())

    def live_until(self, presence: Presence) -> float | None:
        """Return when a presence record expires, on the steady clock; None if it is invalid.

        A record is invalid if it belongs to another run, its signature or its times do not hold, or its peer is not
        admitted. Records pass through other nodes, which may have forged them.
        """
        if presence.run != self._signed.run_id:
            return None
        now = wall()
        if not self.counts(presence.peer):
            return None
        age = now - presence.issued_at
        left = min(presence.lifetime_s, PRESENCE_LIFETIME_S) - age
        if age < -CLOCK_SKEW_S or left <= 0 or not verify(presence):
            return None
        return steady() + min(left, PRESENCE_LIFETIME_S)

    @property
    def status(self) -> str:
        """Whether the run admits this peer, or why not, in a few words; empty in an open run. Safe from any thread."""
        if self.gate is None:
            return ""
        why = self._refusal
        return f"admitted ({self.gate.policy})" if why is None else f"NOT admitted: {why}. {remedy(why, self._me)}"

    async def enter(self, link: JoinLink | None) -> None:
        """Fetch the access list, and a certificate if the link has an invite, until this peer is admitted.

        Returns at once if the certificate on disk still holds. Retries with backoff, and notes it, while the
        invite's issuer does not answer.

        Raises:
            AdmissionError: the run does not admit this peer.
            JoinLinkError: the link's invite is not valid.
        """
        gate = self.gate
        if gate is None:
            return
        credential = (
            InviteCredential.parse(link.invite, self._signed.run_id, gate.author) if link and link.invite else None
        )
        self._connection.stand_at(gate)
        await self._connection.serve(ADMISSION_PROTOCOL, LIMITS, AdmissionHandler(gate).answer)
        pauses_s = backoff(*PAUSE_S)
        while self._check(gate) is not None:
            answered = await self._fetch_access_list(gate)
            why = self._check(gate)
            if why in _CURED_BY_INVITE and credential is not None:
                try:
                    why = await self._request_certificate(gate, credential)
                except (NetworkError, RemoteError) as error:
                    pause_s = next(pauses_s)
                    self._notebook.note("no certificate", why=str(error), seconds=pause_s)
                    await asyncio.sleep(pause_s)
                    continue
            elif not answered and not gate.access_list.serial:
                return  # no access list was found, and it may name us: partners decide
            if why is not None:
                raise AdmissionError(f"This run does not let this peer in: {why}.", remedy(why, self._me))

    async def update(self) -> None:
        """Keep our access list and the DHT's in sync until cancelled."""
        if self.gate is not None:
            await AccessListStore(lambda: self._connection.node.dht, self.gate, self._access_list_changed).run()

    async def _fetch_access_list(self, gate: Gate) -> bool:
        """Ask nodes for the access list until one admits us, as some are outdated; return whether any answered."""
        answered = False
        try:
            node = self._connection.node
        except NetworkError:  # p2pd is being restarted
            return answered
        others = [*node.bootstraps, *(node.known.keys() - set(node.bootstraps))]
        for peer in [each for each in others if each != self._me][:MAX_ASKED]:
            try:
                if await ask_access_list(self._admission_transport(), peer, node.known.get(peer, ()), gate):
                    self._access_list_changed()
            except (NetworkError, RemoteError):  # try the next one, or the DHT later
                continue
            answered = True
            if gate.refusal(self._me, gate.certificate, wall()) is None:
                break
        return answered

    async def _request_certificate(self, gate: Gate, credential: InviteCredential) -> Refusal | None:
        """Ask the invite's issuer for a certificate; return why we are not admitted, or None.

        Raises NetworkError and RemoteError if it gave no valid answer.
        """
        addresses = self._connection.node.known.get(credential.invite.issuer, ())
        made = await come_in(self._admission_transport(), addresses, credential, gate, self._me)
        if isinstance(made, Refusal):
            return made
        why = gate.refusal(self._me, made.encode(), wall())
        if why is None:
            gate.certificate = made.encode()
            self._home.write(self._home.path / CERTIFICATE_FILE, gate.certificate)
            self._notebook.note("let in", peer=credential.invite.issuer, invite=credential.invite.id)
        return why

    def _admission_transport(self) -> Transport:
        return self._connection.speaking(ADMISSION_PROTOCOL, LIMITS)

    def _access_list_changed(self) -> None:
        assert self.gate is not None
        access_list = self.gate.access_list
        try:
            self._home.write(self._home.path / ACCESS_LIST_FILE, access_list.encode())
        except HomeError as error:
            self._notebook.note("not saved", what="the access list", why=error.problem.removesuffix("."))
        counts = {
            "admitted": len(access_list.admitted),
            "banned": len(access_list.banned),
            "revoked": len(access_list.revoked),
        }
        self._notebook.note("rulings", serial=access_list.serial, **counts)
        before, why = self._refusal, self._check(self.gate)
        if why is not None and why is not before:
            self._notebook.note("put out", why=why, remedy=remedy(why, self._me))

    def _check(self, gate: Gate) -> Refusal | None:
        """Return why we are not admitted now, and keep it for ``status``."""
        self._refusal = gate.refusal(self._me, gate.certificate, wall())
        return self._refusal


def gate_of(home: Home, signed: SignedManifest) -> Gate | None:
    """Build the gate from the files of a home; None if the run is open. Raises HomeError."""
    policy = signed.manifest.admission.policy
    if policy == "open":
        return None
    access_list = load_access_list(home.path / ACCESS_LIST_FILE, signed)
    return Gate(policy, signed.run_id, author_of(signed), _read(home.path / CERTIFICATE_FILE), access_list)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise HomeError(f"{path} cannot be read: {error.strerror}.", files.remedy(error, "")) from error
