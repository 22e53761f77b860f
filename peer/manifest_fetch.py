"""Download of the run's manifest from the addresses of a join link, retried until one answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.base.backoff import PAUSE_S, backoff
from p2ptrain.base.errors import NetworkError, RemoteError, UserError
from p2ptrain.manifest import JoinLink, SignedManifest, genuine_run
from p2ptrain.net import address
from p2ptrain.net.manifest_service import fetch_manifest, stranger
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.dialing import UNRESOLVED
from p2ptrain.net.p2pd.error_text import BACKOFF
from p2ptrain.ports import Notebook

SILENCE = "Check that the bootstrap is running and that its port is open in the firewall and forwarded by its router."
"""Remedy if no address answers."""
NAMELESS = "Check this computer's connection and DNS server, or ask for a link with an IP address."
"""Remedy if no host name of the link can be resolved, so that nobody was asked."""
STRANGERS = "Ask the person who gave you the link for a new one."
"""Remedy if another peer answers, so that neither firewall nor router is at fault."""


async def ask_for_manifest(link: JoinLink, node: Callable[[], Node], notebook: Notebook) -> SignedManifest:
    """Request the run's manifest from the link's addresses, with backoff, until one hands it out.

    Notes each failed request and each round.

    Args:
        node: returns the current node; raises NetworkError while there is none.

    Raises:
        ManifestError: the manifest is genuine, but this version of p2ptrain cannot use it.
    """
    pauses_s = backoff(*PAUSE_S)
    hopeless: dict[str, tuple[str, str]] = {}  # address -> why waiting is in vain there, and the remedy
    while True:
        for each in link.addresses:
            place, peer = address.split_peer(each)
            assert peer is not None  # JoinLink checked it
            raw = b""
            try:
                raw = await fetch_manifest(node(), peer, [place], link.run_id)
                signed = SignedManifest.from_bytes(raw)
                signed.verify(link.run_id)
            except UserError as error:
                if genuine_run(raw) == link.run_id:
                    raise  # the manifest is genuine: another p2ptrain must be installed here
                notebook.note("no manifest", peer=peer, where=address.host_port(place), why=error.problem)
            except (NetworkError, RemoteError) as error:
                if why := stranger(str(error)):
                    hopeless[each] = why, STRANGERS
                elif UNRESOLVED in str(error):
                    hopeless[each] = str(error), NAMELESS
                elif not str(error).endswith(BACKOFF):  # a backoff says nothing new
                    hopeless.pop(each, None)
                notebook.note("no manifest", peer=peer, where=address.host_port(place), why=str(error))
            else:
                return signed
        why, remedy = "no address in the link returned the run's manifest", SILENCE
        if len(hopeless) == len(link.addresses):
            why, remedy = hopeless[link.addresses[0]]
        pause_s = next(pauses_s)
        notebook.note("waiting", why=why, seconds=pause_s, remedy=remedy)
        await asyncio.sleep(pause_s)
