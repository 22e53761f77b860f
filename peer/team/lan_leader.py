"""A leader's listener for ranks on other computers of a private network.

The listener lives as long as the peer. A computer that loses its line dials again and takes its old place, and the next
generation begins.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import p2ptrain
from p2ptrain.base.errors import DeviceError, NetworkError, RemoteError, TeamError
from p2ptrain.base.text import printable
from p2ptrain.manifest import SignedManifest
from p2ptrain.ports import Notebook
from p2ptrain.team.connection import ByteLine, RankConnection
from p2ptrain.team.lan_address import LanAddress, interface_of
from p2ptrain.team.lan_messages import (
    BeatMessage,
    ControlLine,
    EndMessage,
    JoinMessage,
    ReadyMessage,
    RefusalMessage,
    ReportMessage,
    WelcomeMessage,
    beat,
)
from p2ptrain.team.sealed import (
    GENERATION_BYTES,
    Hello,
    Purpose,
    SealedLine,
    WrongKeyError,
    accept_rank,
    generation_key,
)
from p2ptrain.team.store import MOST_VALUE_BYTES, LeaderStore, StoreContent, serve_store
from p2ptrain.train.team_group import Rendezvous
from peer.team.meeting import MeetingPoint
from peer.team.plan import RankReport
from peer.team.remote_rank import POLL_S, Visitor

MOST_GREETINGS = 16
"""Maximum of connections that have not proved the key."""
WARN_S = 60.0
"""Seconds between two notes about connections without the key."""


@dataclass(slots=True)
class OpenMeeting:
    """Lines of one generation."""

    name: bytes
    key: bytes
    content: StoreContent
    shards: dict[int, ByteLine] = field(default_factory=dict)
    stores: list[ByteLine] = field(default_factory=list)


class LanListener:
    """Listens on one private address for the ranks of one team. Owns its threads; ``close`` it.

    Args:
        key, key_file: of the team.
        ranks: numbers of the ranks on other computers.
        is_stopping: whether the owner stops the peer, which ends all waits.

    Raises DeviceError if the address is not this computer's or taken.
    """

    def __init__(
        self,
        address: LanAddress,
        key: bytes,
        key_file: Path,
        signed: SignedManifest,
        ranks: range,
        notebook: Notebook,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.interface = interface_of(address.host)
        self.address = address
        self.ranks = ranks
        self.is_stopping = is_stopping
        self.on_left: Callable[[], None] = lambda: None
        """Called when a computer that has joined leaves, before its place is free; not while this listener closes."""
        self._key = key
        self._told = {"leader": str(address), "key": str(key_file.absolute())}
        self._signed = signed
        self._notebook = notebook
        self._changed = threading.Condition()
        self._visitors: dict[int, Visitor] = {}
        self._meeting: OpenMeeting | None = None
        self._greetings = 0
        self._warned_at = float("-inf")
        self._is_closed = False
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((address.host, address.port))
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise DeviceError(
                f"This peer cannot listen on {address}: {error.strerror}.",
                "Another leader may use it; choose another port, as --at "
                f"{address.host}:{min(address.port + 1, 65_535)}.",
            ) from error
        self._thread = threading.Thread(target=self._accept, name="lan-listener", daemon=True)
        self._thread.start()

    # --- the trainer thread -------------------------------------------------------------------------------------------

    def open_meeting(self, timeout_s: float) -> MeetingPoint:
        self.close_meeting()
        name = secrets.token_bytes(GENERATION_BYTES)
        key = generation_key(self._key, name)
        with self._changed:
            self._meeting = OpenMeeting(name, key, StoreContent(timeout_s))
        return MeetingPoint(key, leader=str(self.address), host=self.address.host, name=name.hex())

    def rendezvous(self, size: int, generation: int) -> Rendezvous:
        assert self._meeting is not None, "a meeting is open"
        return Rendezvous(Path(), 0, size, generation, LeaderStore(self._meeting.content), self.interface)

    def shard_lines(
        self, size: int, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False
    ) -> list[ByteLine]:
        meeting = self._meeting
        assert meeting is not None, "a meeting is open"
        until = time.monotonic() + timeout_s
        with self._changed:
            while len(meeting.shards) < size - 1 and time.monotonic() < until and not is_stopping():
                self._changed.wait(POLL_S)
            missing = [rank for rank in range(1, size) if rank not in meeting.shards]
            if missing:
                raise TeamError("connecting the ranks", f"ranks {missing} did not come in {timeout_s:.0f} s")
            found, meeting.shards = [meeting.shards[rank] for rank in range(1, size)], {}
            return found

    def close_meeting(self) -> None:
        with self._changed:
            meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.content.close()
            for line in (*meeting.shards.values(), *meeting.stores):
                line.close()

    def visitor(self, rank: int) -> Visitor | None:
        """Return the computer in a place; None: the place is free."""
        with self._changed:
            return self._visitors.get(rank)

    def await_ready(self, rank: int) -> Visitor:
        """Wait until a computer is in a place and ready, or the owner stops the peer. Raises TeamError."""
        told = False
        with self._changed:
            while True:
                visitor = self._visitors.get(rank)
                if visitor is not None and visitor.is_ready:
                    return visitor
                if self.is_stopping() or self._is_closed:
                    raise TeamError("waiting for other computers", "the peer was stopped")
                if visitor is None and not told:
                    told = True
                    self._notebook.note("waiting for ranks", ranks=self.missing(), **self._told)
                self._changed.wait(POLL_S)

    def missing(self) -> int:
        """Return the number of free places."""
        with self._changed:
            return len(self.ranks) - len(self._visitors)

    def names(self) -> list[str]:
        """Return the devices of the other computers, for people."""
        with self._changed:
            there = [self._visitors.get(rank) for rank in self.ranks]
        return ["?" if each is None else f"{each.device} of {each.name}" for each in there]

    def close(self, is_final: bool = False) -> None:
        """Stop listening and end all lines. Safe to call twice.

        Args:
            is_final: whether the run has ended, so that the other computers need not wait for this one.
        """
        self.close_meeting()
        with self._changed:
            self._is_closed = True
            visitors, self._visitors = list(self._visitors.values()), {}
            self._changed.notify_all()
        for visitor in visitors:
            with suppress(NetworkError):
                visitor.line.send(EndMessage(is_final=is_final))
            visitor.stops.set()
            visitor.line.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    # --- threads of the listener --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(POLL_S)  # out of file descriptors
                continue
            with self._changed:
                if self._greetings >= MOST_GREETINGS:
                    connection.close()
                    continue
                self._greetings += 1
            threading.Thread(target=self._greet, args=(connection, host), name="lan-line", daemon=True).start()

    def _greet(self, connection: socket.socket, host: str) -> None:
        try:
            hello, line = accept_rank(connection, self._key_for)
        except WrongKeyError:
            self._warn(host, "it has another key")
            return
        except (NetworkError, RemoteError) as error:
            self._warn(host, str(error))
            return
        finally:
            with self._changed:
                self._greetings -= 1
        match hello.purpose:
            case Purpose.CONTROL:
                self._host(line)
            case Purpose.STORE:
                with self._changed:
                    meeting = self._meeting
                    if meeting is None or meeting.name != hello.generation:
                        line.close()
                        return
                    meeting.stores.append(line)  # ``close_meeting`` ends it: a computer that vanished never does
                serve_store(meeting.content, RankConnection(line, 2 * MOST_VALUE_BYTES))
            case Purpose.SHARD:
                with self._changed:
                    meeting = self._meeting
                    if meeting is None or meeting.name != hello.generation or hello.rank in meeting.shards:
                        line.close()
                    else:
                        meeting.shards[hello.rank] = line
                        self._changed.notify_all()

    def _key_for(self, hello: Hello) -> bytes | None:
        if hello.purpose is Purpose.CONTROL:
            return self._key
        meeting = self._meeting
        return meeting.key if meeting is not None and meeting.name == hello.generation else None

    def _warn(self, host: str, why: str) -> None:
        with self._changed:
            now = time.monotonic()
            if now - self._warned_at < WARN_S:
                return
            self._warned_at = now
        self._notebook.note("rank refused", where=host, why=why)

    def _host(self, line: SealedLine) -> None:
        """Serve one computer's control line until it ends."""
        control, host = ControlLine(line), line.other_host
        visitor: Visitor | None = None
        try:
            message, _ = control.receive()
            if not isinstance(message, JoinMessage):
                raise RemoteError("the first message is not the one that joins")
            refusal, visitor = self._admitted(message, control, host)
            if visitor is None:
                self._notebook.note("rank refused", where=host, why=refusal.reason)
                control.send(refusal)
                return
            control.send(WelcomeMessage(rank=visitor.rank), self._signed.to_bytes())
            self._notebook.note("rank joined", name=visitor.name, device=visitor.device, where=host)
            threading.Thread(target=beat, args=(control, visitor.stops), name="lan-beat", daemon=True).start()
            while True:
                message, _ = control.receive()
                self._heard(visitor, message)
        except (NetworkError, RemoteError) as error:
            if visitor is not None and not self._is_closed:
                self._notebook.note("rank left", name=visitor.name, device=visitor.device, where=host, why=str(error))
        finally:
            control.close()
            if visitor is not None:
                visitor.stops.set()
                with self._changed:
                    visitor.is_lost = True
                if not self._is_closed:
                    self.on_left()
                with self._changed:
                    if self._visitors.get(visitor.rank) is visitor:
                        del self._visitors[visitor.rank]
                    self._changed.notify_all()

    def _admitted(self, join: JoinMessage, line: ControlLine, host: str) -> tuple[RefusalMessage, Visitor | None]:
        own, reason, remedy, is_final = p2ptrain.__version__, "", "", True
        if join.version != own:
            reason = f"The rank runs p2ptrain {printable(join.version)}, and its leader {own}."
            remedy = "Install the same version on both computers."
        elif join.run not in (None, self._signed.run_id):
            reason = f"The rank's home belongs to run {printable(str(join.run))[:12]}…, its leader's to another one."
            remedy = "Use a separate home for each run, with --home."
        with self._changed:
            free = [rank for rank in self.ranks if rank not in self._visitors]
            if not reason and not free:
                reason, is_final = f"All {len(self.ranks)} places for other computers in this team are taken.", False
                remedy = "Start the leader with a larger --team."
            refusal = RefusalMessage(reason=reason, remedy=remedy, is_final=is_final)
            if reason or self._is_closed:
                return refusal, None
            visitor = Visitor(free[0], printable(join.name), printable(join.device), host, line)
            self._visitors[visitor.rank] = visitor
            return refusal, visitor

    def _heard(self, visitor: Visitor, message: object) -> None:
        match message:
            case BeatMessage():
                return
            case ReadyMessage():
                with self._changed:
                    visitor.is_ready = True
                    self._changed.notify_all()
            case ReportMessage(kind=kind, reason=reason, remedy=remedy):
                known = "error" if kind == "ended" else kind
                with self._changed:
                    visitor.report = RankReport(kind=known, reason=reason, remedy=remedy)
                    self._changed.notify_all()
            case RefusalMessage(reason=reason):
                raise NetworkError(f"it cannot take part: {reason}")
            case _:
                raise RemoteError("a message that ranks do not send")
