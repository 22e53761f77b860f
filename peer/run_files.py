"""Files that a peer needs to train in a run: where they are, or their download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from p2ptrain.base.daemon_thread import DaemonThread
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import EventLog
from p2ptrain.data.corpus import has_stream
from p2ptrain.data.file_store import WEIGHTS_OPTION, NamedFile, named_files
from p2ptrain.data.stream import cache_directory
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net import address
from p2ptrain.net.file_service import FILES_PROTOCOL
from p2ptrain.net.file_service import LIMITS as FILES_LIMITS
from p2ptrain.ports import Link
from peer.admission_client import AdmissionClient
from peer.assembly import PeerOptions
from peer.file_fetch import Source, ask_for_file, local_file
from peer.home import Home
from peer.initial_weights import needs_weights, provide_weights
from peer.network_stack import NetworkStack

MAX_ASKED = 8
"""Peers that are asked for a file in one round, besides bootstraps. Guess: the share of peers that have it."""


def with_files(
    options: PeerOptions,
    given: PeerOptions,
    home: Home,
    signed: SignedManifest,
    network: NetworkStack | None,
    admission: AdmissionClient | None,
    thread: DaemonThread,
    log: EventLog,
) -> PeerOptions:
    """Return the options with the paths of files that the run names by digest, downloaded if this machine has none.

    Runs in the thread.

    Raises CorpusError if the owner named another file, WeightsError if the run begins from weights that no peer sends,
    HomeError if a file cannot be stored.
    """
    paths: dict[str, Path | None] = {}
    for file in named_files(signed.manifest):
        if file.option == WEIGHTS_OPTION:
            continue
        name = file.option.removeprefix("--")
        is_needed = name != "data" or not has_stream(signed.manifest, cache_directory())
        remembered = getattr(options, name) if is_needed and name else None
        path = local_file(file, home.files, getattr(given, name) if name else None, remembered)
        if path is None and is_needed and network is not None and admission is not None:
            data = thread.result_of(_download(file, options.link, home, network, admission, log))
            path = None if data is None else home.files.add(file.sha256, data)
        paths[name] = path
    options = replace(options, data=paths.get("data"), tokenizer=paths.get("tokenizer"), template=paths.get("template"))
    if needs_weights(signed.manifest, home):

        def download(file: NamedFile) -> bytes | None:
            if network is None or admission is None:
                return None
            return thread.result_of(_download(file, options.link, home, network, admission, log))

        provide_weights(signed.manifest, home, options.weights, given.weights is not None, download)
    return options


async def _download(
    file: NamedFile,
    link: JoinLink | None,
    home: Home,
    network: NetworkStack,
    admission: AdmissionClient,
    log: EventLog,
) -> bytes | None:
    connection = network.connection
    entries = map(address.split_peer, link.addresses if link else home.load_addresses().joined_by)
    bootstraps = [(peer, [place]) for place, peer in entries if peer is not None]

    async def sources() -> Sequence[Source]:
        try:
            records = await connection.lookup()
        except NetworkError:
            records = []
        others = [(each.peer, each.addresses) for each in records if each.peer != network.identity.peer_id]
        return [*bootstraps, *Random().sample(others, min(len(others), MAX_ASKED))]

    async def dial(peer: PeerId, addresses: Sequence[str]) -> Link:
        speaking = connection.speaking(FILES_PROTOCOL, FILES_LIMITS)
        return await admission.transport(speaking, checks_responder=False).open(peer, addresses)

    return await ask_for_file(file, sources, dial, log)
