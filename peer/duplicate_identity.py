"""Detection of a second process with this peer's identity: a copied home, or the image of a whole computer.

Both processes announce themselves under one peer id, so each finds presence records in the directory that its key
signed and that it did not issue itself. A record tells when its process began (``Presence.since``): the older process
goes on. The other one announces nothing more and stops as at Ctrl+C, with an error at its end, within about a minute.

Nobody without the key can make such a record. Those of this home's earlier processes do not count, because nobody
renews them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from p2ptrain.base.clock import steady, wall
from p2ptrain.base.errors import HomeError
from p2ptrain.base.ids import short
from p2ptrain.base.text import command_line
from p2ptrain.net import address
from p2ptrain.ports import Clock, Notebook
from p2ptrain.swarm import PeerState, Presence
from peer.home import Home

NOTE_PERIOD_S = 600.0


class IdentityWatch:
    """Watches for records of this identity that others issued. Runs in the loop."""

    def __init__(self, home: Home, notebook: Notebook, wall: Clock = wall, clock: Clock = steady) -> None:
        self.since = wall()
        """Time of this process's start, in seconds since 1970."""
        self.rival: Presence | None = None
        """Record of the process that this one yields to; None if it yields to nobody."""
        self._home = home
        self._notebook = notebook
        self._clock = clock
        self._stop: Callable[[], None] = lambda: None
        self._seen: Presence | None = None
        self._note_at = -math.inf

    def see(self, presence: Presence) -> None:
        """Compare a valid record of this identity with our own ones."""
        if presence.since == self.since or presence.state is PeerState.LEAVING or self.rival is not None:
            return
        before, self._seen = self._seen, presence
        is_renewed = before is not None and before.since == presence.since and before.issued_at < presence.issued_at
        if not is_renewed or presence.issued_at <= self.since:
            return
        yields = presence.since < self.since
        if yields or self._clock() >= self._note_at:
            self._note_at = self._clock() + NOTE_PERIOD_S
            self._notebook.note(
                "same identity",
                name=short(presence.peer),
                where=_where(presence),
                step=presence.step,
                yields=yields,
                command=self.command,
            )
        if yields:
            self.rival = presence
            self._stop()

    def stop_by(self, stop: Callable[[], None]) -> None:
        """Call ``stop``, which makes the trainer save and leave, once this process yields; at once if it has."""
        self._stop = stop
        if self.rival is not None:
            stop()

    @property
    def command(self) -> str:
        """Command that gives this home an identity of its own."""
        return command_line("p2ptrain", "identity", "--new", self._home.path.absolute())

    def error(self) -> HomeError | None:
        """Return why this process ended, if it has yielded."""
        if self.rival is None:
            return None
        return HomeError(
            f"Another process uses this peer's identity {short(self.rival.peer)}, at {_where(self.rival)}. Only one "
            "can take part, so this one has stopped.",
            f"If this home was copied, give it an identity of its own, which keeps its checkpoint: {self.command}",
        )


def _where(presence: Presence) -> str:
    hosts = [address.host_of(each) for each in presence.addresses]
    return ", ".join(dict.fromkeys(hosts[:3])) or "an unknown address"
