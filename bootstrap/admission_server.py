"""Admission at a bootstrap of a closed run: it issues certificates for invites and serves the author's access list.

::

    RUN/rulings.signed    access list; read when it changes, and replaced by a newer one from the DHT, so that an
                          author who continues on another machine loses no ban
    HOME/guests.json      register of used invites, written before a certificate is issued
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from bootstrap.messages import Say
from p2ptrain.admission import Gate, InviteRegister
from p2ptrain.admission.author import ACCESS_LIST_FILE, author_of, load_access_list
from p2ptrain.base import files
from p2ptrain.base.background import in_background
from p2ptrain.base.errors import AdmissionError, HomeError, NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.text import command_line
from p2ptrain.manifest import KEY_FILE, SignedManifest
from p2ptrain.net.access_list_store import AccessListStore
from p2ptrain.net.admission_service import AdmissionHandler, serve_admission
from p2ptrain.net.identity import Identity
from p2ptrain.net.node import Node
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport

LOOK_EVERY_S = 3.0
"""Interval between checks of the access list file. Guess: ask authors; a check is one ``stat``."""


class AdmissionServer:
    """Admission to one run, on the current node and later ones. Raises UserError if a file is not valid."""

    def __init__(self, run: Path, home: Path, signed: SignedManifest, identity: Identity, say: Say) -> None:
        self._say = say
        self._signed = signed
        self._file = run / ACCESS_LIST_FILE
        self._register_file = home / "guests.json"
        self._seen = self._stamp()
        policy = signed.manifest.admission.policy
        self.gate = Gate(policy, signed.run_id, author_of(signed), access_list=load_access_list(self._file, signed))
        self._desk = AdmissionHandler(self.gate, self._register(identity), identity.state, self._keep)
        say("doorman", f"the join link alone admits nobody; for each peer: {_order(run, policy)}")

    async def serve(self, node: Node, rates: Throttles) -> P2PTransport:
        """Serve admission on a node until the returned transport is closed."""
        node.stand_at(self.gate)
        return await serve_admission(node, self._desk, rates)

    async def watch(self, node: Node) -> None:
        """Keep the newest access list in the file, in the DHT and here, until cancelled. Survives NetworkError."""
        shelf = AccessListStore(lambda: node.dht, self.gate, self._learnt)
        async with in_background(shelf.run()):
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                if self._look():
                    try:
                        await shelf.store()
                    except NetworkError:
                        continue  # the store tries again within a minute

    def _look(self) -> bool:
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            access_list = load_access_list(self._file, self._signed)
        except AdmissionError as error:
            self._say("doorman", f"{error.problem} The previous access list stays in force.")
            return False
        if access_list is None or not self.gate.take(access_list.encode()):
            return False
        self._tell()
        return True

    def _learnt(self) -> None:
        self._tell()
        try:
            files.replace(self._file, self.gate.access_list.encode())
        except OSError as error:
            self._say("doorman", f"the newest access list could not be saved in {self._file}: {error.strerror}")
        self._seen = self._stamp()

    def _tell(self) -> None:
        access_list = self.gate.access_list
        self._say(
            "doorman",
            f"access list {access_list.serial}: {len(access_list.admitted)} admitted, {len(access_list.banned)} banned,"
            f" {len(access_list.revoked)} invites revoked",
        )

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _register(self, identity: Identity) -> InviteRegister:
        path = self._register_file
        try:
            return InviteRegister.decode(path.read_bytes(), self._signed.run_id, identity.peer_id)
        except FileNotFoundError:
            return InviteRegister(self._signed.run_id, identity.peer_id)
        except OSError as error:
            raise HomeError(f"{path} cannot be read: {error.strerror}.", files.remedy(error, "")) from error
        except ValueError as error:
            raise HomeError(
                f"{path} cannot be used: {error}.",
                "Revoke the used invites first: without this file they can be used again. Then move it away.",
            ) from error

    def _keep(self, encoded: bytes, guest: PeerId, invite: str) -> None:
        files.replace(self._register_file, encoded)
        self._say("doorman", f"let {guest} in by invite {invite}")


def _order(run: Path, policy: str) -> str:
    """Return the command by which the author admits a peer: here, or on the machine that has the key."""
    if (run / KEY_FILE).exists():
        verb, names = ("invite", "") if policy == "invite" else ("admit", " PEER_ID")
        return command_line("p2ptrain", verb, run) + names
    if policy == "invite":
        return f"where {KEY_FILE} lies, p2ptrain invite RUN --link LINK"
    return f"where {KEY_FILE} lies, p2ptrain admit RUN PEER_ID; then copy RUN/{ACCESS_LIST_FILE} to {run}"
