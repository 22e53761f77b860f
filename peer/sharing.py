"""This peer's page, and its figures for bootstraps that show the swarm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from p2ptrain.base.clock import steady
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net.figures_service import FIGURES_PROTOCOL, LIMITS, FiguresService, Telling
from p2ptrain.page.listen_address import ListenAddress
from p2ptrain.page.memory import PageMemory
from p2ptrain.page.server import PageServer
from p2ptrain.ports import Notebook
from peer.contributions import Contributions
from peer.home import Home
from peer.network import Connection
from peer.owner.control import OwnerControl
from peer.participation import Participation
from peer.paths import Paths
from peer.session_recorder import SessionRecorder
from peer.state import Sources, StatusView

MEET_S = 2.0
"""Seconds between two updates of the list of live peers: as often as the page asks. Guess: how fast viewers expect a
change."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Shows this peer on its page and to bootstraps.

    Args:
        listen_address: listen address of the page; None: no page.
        is_shared: whether bootstraps get the figures.
        show: shows a line to the owner only; the log and ``p2ptrain status`` do not get it.
        is_tracked: whether a tracker gets the figures.
    """

    state: StatusView
    owner: OwnerControl
    listen_address: ListenAddress | None
    is_shared: bool
    show: Callable[[str], None] = print
    is_tracked: bool = False

    def is_watched(self) -> bool:
        return self.listen_address is not None or self.is_shared or self.is_tracked

    def open(self, start: Callable[[Coroutine[Any, Any, None]], object], notebook: Notebook) -> None:
        """Open the page, if there is one. Raises UserError if it cannot be served.

        Args:
            start: starts a background task.
        """
        if self.listen_address is not None:
            server = PageServer(self.listen_address, self.state.document)
            server.bind()
            start(server.serve())
            notebook.note("page", url=server.address)
            if server.url != server.address:
                self.show(f"[page] open it with its token: {server.url}")

    def set_run(self, signed: SignedManifest, home: Home, record: SessionRecorder, local: bool) -> None:
        """Show the run and this peer's training figures from now on."""
        parameters = record.task.figures.parameter_count
        self.state.set_run(signed, parameters, lambda: _join(signed, home, local))
        foreign = home.foreign_tokens()
        self.state.set_sources(Sources(record.figures, self.owner.measured, self.owner.traffic, foreign))
        self.state.remember(PageMemory.load(home.path, signed.run_id))
        record.is_watched = self.is_watched

    async def update(
        self, connection: Connection, participation: Participation, paths: Paths, contributions: Contributions
    ) -> None:
        """Answer requests for figures and update the list of live peers until cancelled."""

        def report() -> Telling | None:
            return self.state.report if self.is_shared else None

        await connection.serve(FIGURES_PROTOCOL, LIMITS, FiguresService(report).answer)
        while True:
            self.state.update_peers(participation.live_records(steady()), paths.way_to)
            self.state.contributed(contributions.newest, contributions.of_partners)
            await asyncio.sleep(MEET_S)


def _join(signed: SignedManifest, home: Home, local: bool) -> str:
    """Return the command by which others can join now; empty if a link alone admits nobody."""
    addresses = home.load_addresses().link_addresses()
    if signed.manifest.admission.policy != "open" or not addresses:
        return ""
    return f"p2ptrain peer '{JoinLink(signed.run_id, addresses)}'{' --local' if local else ''}"
