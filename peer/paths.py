"""How links travel, directly or through a relay, and that the terminal says so."""

from __future__ import annotations

from typing import Any

from p2ptrain.base.ids import PeerId
from p2ptrain.net.links import StreamLink
from p2ptrain.ports import Notebook

TRAVELLED = {"exchanged", "caught up", "gave weights"}
"""Notes of bytes that passed between a partner and us."""
MOST_PATHS = 512
"""Partners whose path is remembered."""


class Paths:
    """How the latest link with each partner travels: directly, or through which relay."""

    def __init__(self) -> None:
        self._relays: dict[PeerId, PeerId | None] = {}

    def note(self, link: StreamLink) -> None:
        self._relays.pop(link.peer, None)  # the latest are last
        self._relays[link.peer] = link.far_end.relay
        while len(self._relays) > MOST_PATHS:
            del self._relays[next(iter(self._relays))]

    def relay(self, peer: PeerId) -> PeerId | None:
        """None: directly, or there was no link."""
        return self._relays.get(peer)


class PathNotebook:
    """A notebook that adds to what it is told of a partner through which relay the bytes went (``relay``)."""

    def __init__(self, notebook: Notebook, paths: Paths) -> None:
        self._notebook = notebook
        self._paths = paths

    def note(self, kind: str, **fields: Any) -> None:
        relay = self._paths.relay(fields["peer"]) if kind in TRAVELLED and fields.get("peer") else None
        self._notebook.note(kind, **fields, **({"relay": relay} if relay else {}))
