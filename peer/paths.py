"""Paths of links, direct or through a relay, and their display on the terminal."""

from __future__ import annotations

from typing import Any

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.net.links import StreamLink
from p2ptrain.ports import Notebook

TRAVELLED = {"exchanged", "caught up", "gave weights"}
"""Kinds of notes about bytes that passed between a partner and us."""
MAX_PATHS = 512


class Paths:
    """The path of the latest link with each partner: direct, or through which relay."""

    def __init__(self) -> None:
        self._relays: BoundedDict[PeerId, PeerId | None] = BoundedDict(MAX_PATHS)

    def note(self, link: StreamLink) -> None:
        self._relays[link.peer] = link.far_end.relay

    def relay(self, peer: PeerId) -> PeerId | None:
        """Return the relay of the latest link with a peer; None if it was direct or there was none."""
        return self._relays.get(peer)


class PathNotebook:
    """A notebook that adds the relay that carried the bytes (``relay``) to notes about a partner."""

    def __init__(self, notebook: Notebook, paths: Paths) -> None:
        self._notebook = notebook
        self._paths = paths

    def note(self, kind: str, **fields: Any) -> None:
        relay = self._paths.relay(fields["peer"]) if kind in TRAVELLED and fields.get("peer") else None
        self._notebook.note(kind, **fields, **({"relay": relay} if relay else {}))
