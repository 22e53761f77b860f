"""Paths of links: direct, direct through both routers, or through a relay; and their display on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.net.links import StreamLink
from p2ptrain.page.view import PUNCHED
from p2ptrain.ports import Notebook

TRAVELLED = {"exchanged", "caught up", "gave weights"}
"""Kinds of notes about bytes that passed between a partner and us."""
MAX_PATHS = 512


@dataclass(frozen=True, slots=True)
class _Path:
    relay: PeerId | None = None
    is_punched: bool = False


class Paths:
    """The path of the latest link with each partner."""

    def __init__(self) -> None:
        self._paths: BoundedDict[PeerId, _Path] = BoundedDict(MAX_PATHS)

    def note(self, link: StreamLink, is_unreachable: bool = False, addresses: Sequence[str] = ()) -> None:
        """Note a link.

        Args:
            is_unreachable: whether nobody can dial this peer.
            addresses: those that the partner announces; circuits alone if nobody can dial it either.
        """
        far_end = link.far_end
        is_far = far_end.relay is None and address.is_public(far_end.place)
        is_punched = is_far and is_unreachable and address.way_to(addresses) == "relayed"
        self._paths[link.peer] = _Path(far_end.relay, is_punched)

    def relay(self, peer: PeerId) -> PeerId | None:
        """Return the relay of the latest link with a peer; None if it was direct or there was none."""
        return self._paths.get(peer, _Path()).relay

    def is_punched(self, peer: PeerId) -> bool:
        """Return whether the latest link with a peer was direct although nobody can dial either side."""
        return self._paths.get(peer, _Path()).is_punched

    def way_to(self, peer: PeerId) -> str:
        """Return how the latest link with a peer went, as the page shows it; empty if its record tells enough."""
        return "relayed" if self.relay(peer) else PUNCHED if self.is_punched(peer) else ""


class PathNotebook:
    """A notebook that adds the path of the bytes to notes about a partner: ``relay``, or ``punched`` if True."""

    def __init__(self, notebook: Notebook, paths: Paths) -> None:
        self._notebook = notebook
        self._paths = paths

    def note(self, kind: str, **fields: Any) -> None:
        if kind in TRAVELLED and (peer := fields.get("peer")):
            if relay := self._paths.relay(peer):
                fields["relay"] = relay
            elif self._paths.is_punched(peer):
                fields["punched"] = True
        self._notebook.note(kind, **fields)
