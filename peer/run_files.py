"""Files and text that a peer needs to train in a run: their download, and the supply of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

from p2ptrain.base.backoff import PAUSE_S, backoff
from p2ptrain.base.daemon_thread import DaemonThread, nap
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import EventLog
from p2ptrain.checkpoint import checkpoints_in, explained
from p2ptrain.data.file_store import INDEX, WEIGHTS_OPTION, NamedFile, named_files
from p2ptrain.data.hub_weights import HubUnavailableError
from p2ptrain.data.weight_files import local_weights
from p2ptrain.manifest import JoinLink, Manifest, SignedManifest
from p2ptrain.net import address
from p2ptrain.net.file_service import FILES_PROTOCOL
from p2ptrain.net.file_service import LIMITS as FILES_LIMITS
from p2ptrain.net.shard_mirror import Mirror
from p2ptrain.net.shard_service import LIMITS as SHARDS_LIMITS
from p2ptrain.net.shard_service import SHARDS_PROTOCOL, ShardServer
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Link, Notebook
from p2ptrain.tokens.opened import open_corpus, user_store
from peer.admission_client import AdmissionClient
from peer.file_fetch import Source, ask_for_file
from peer.home import Home
from peer.network import Connection
from peer.shard_sources import ShardSources
from peer.space import text_bytes
from peer.start_options import PeerOptions
from peer.token_supply import TokenSupply

MAX_ASKED = 8
"""Peers that are asked for a file in one round, besides bootstraps. Guess: the share of peers that have it."""
LOOKUP_S = 8.0
"""Seconds for which a list of the peers is used before this peer is in the swarm, since a lookup moves some 100 kB."""


class RunFiles:
    """Download of what one run needs.

    Args:
        network, admission: None: this peer takes part in no swarm, and only mirrors have something.
    """

    def __init__(
        self,
        options: PeerOptions,
        home: Home,
        signed: SignedManifest,
        network: Connection | None,
        admission: AdmissionClient | None,
        log: EventLog,
        rates: Throttles,
    ) -> None:
        self._options, self._home, self._signed, self._log, self._rates = options, home, signed, log, rates
        self._network, self._admission = network, admission
        self._bootstraps = [] if network is None else bootstraps_of(options.link, home)
        corpus = signed.manifest.corpus
        mirrors = [Mirror(options.mirror, True, rates)] if options.mirror else []
        if corpus.kind == "shards" and corpus.mirror:
            mirrors.append(Mirror(corpus.mirror, False, rates))
        self._mirrors = mirrors
        self._found: Sequence[Source] = []
        self._found_at = -LOOKUP_S

    async def index(self) -> None:
        """Have the index of the run's text, if it has one. Raises HomeError."""
        for file in named_files(self._signed.manifest):
            if file.what == INDEX:
                await self._provide(file)

    async def others(self) -> None:
        """Have the files that show and export text, if anybody sends them. Raises HomeError."""
        for file in named_files(self._signed.manifest):
            if not file.is_needed:
                await self._provide(file)

    def weights(self, thread: DaemonThread) -> None:
        """Have the initial weights, if the run begins from named ones; in the thread. Raises as ``have_weights``."""

        def download(file: NamedFile) -> bytes | None:
            assert file.option == WEIGHTS_OPTION
            return thread.result_of(self._download(file))

        have_weights(self._signed.manifest, self._home, self._options.weights, download, self._log)

    async def supply(self, me: PeerId) -> TokenSupply | None:
        """Return the supply of the run's text, to be run, and serve its shards; None if it ships with the package.

        Raises CorpusError and ManifestError if the index does not fit the run.
        """
        manifest, options = self._signed.manifest, self._options
        if manifest.corpus.kind != "shards":
            return None
        store, path = user_store(), await self._stored(manifest.corpus.root)
        corpus = await asyncio.to_thread(open_corpus, manifest, store, path)
        sources = ShardSources(
            corpus.index, self._bootstraps, self.peers, self._dial(SHARDS_PROTOCOL), self._mirrors, Random()
        )
        found = TokenSupply(
            corpus.index,
            store,
            corpus.walk(manifest.run.seed, me),
            manifest.training.sequences_per_step,
            sources,
            self._log,
            self._rates,
            text_bytes(options.text_gb),
        )
        if not checkpoints_in(self._home.checkpoints):  # else training knows where it is
            found.begin(0)
        if self._network is not None and self._admission is not None:
            server = ShardServer(corpus.index, store, self._rates, coming=lambda: found.coming)
            handler = self._admission.guarded(server.answer)
            await self._network.serve(SHARDS_PROTOCOL, SHARDS_LIMITS, handler)
        return found

    async def peers(self) -> Sequence[Source]:
        """Return other peers. Raises NetworkError."""
        if self._network is not None and time.monotonic() - self._found_at >= LOOKUP_S:
            self._found_at = time.monotonic()
            await self._network.announce_early()
            records = await self._network.lookup()
            me = self._network.identity.peer_id
            self._found = [(each.peer, each.addresses) for each in records if each.peer != me]
        return self._found

    async def _provide(self, file: NamedFile) -> None:
        if await self._stored(file.sha256) is None and (data := await self._download(file)) is not None:
            await asyncio.to_thread(self._home.files.add, file.sha256, data)

    async def _stored(self, sha256: str) -> Path | None:
        return await asyncio.to_thread(self._home.files.find, sha256)

    async def _download(self, file: NamedFile) -> bytes | None:
        async def sources() -> Sequence[Source]:
            try:
                others = [each for each in await self.peers() if each[0] not in dict(self._bootstraps)]
            except NetworkError:
                others = []
            return [*self._bootstraps, *Random().sample(others, min(len(others), MAX_ASKED))]

        return await ask_for_file(file, sources, self._dial(FILES_PROTOCOL), self._log, self._mirrors)

    def _dial(self, protocol: str) -> Callable[[PeerId, Sequence[str]], Awaitable[Link]]:
        limits = FILES_LIMITS if protocol == FILES_PROTOCOL else SHARDS_LIMITS

        async def dial(peer: PeerId, addresses: Sequence[str]) -> Link:
            assert self._network is not None  # there is nobody to dial
            assert self._admission is not None
            speaking = self._network.speaking(protocol, limits)
            return await self._admission.transport(speaking, checks_responder=False).open(peer, addresses)

        return dial


def bootstraps_of(link: JoinLink | None, home: Home) -> list[Source]:
    """Return the nodes of the link by which a peer joins, or joined the last time, with all their addresses."""
    found: dict[PeerId, list[str]] = {}
    for each in link.addresses if link else home.load_addresses().joined_by:
        place, peer = address.split_peer(each)
        if peer is not None:
            found.setdefault(peer, []).append(place)
    return list(found.items())


def have_weights(
    manifest: Manifest,
    home: Home,
    place: Path | None,
    download: Callable[[NamedFile], bytes | None],
    notebook: Notebook,
) -> None:
    """Have the run's initial weights on this machine, unless a checkpoint replaces them; wait for a hub that fails.

    ``place``, ``download``: as for ``local_weights``. Raises WeightsError for what waiting does not heal, CorpusError
    or HomeError if a file cannot be read or stored.
    """
    with explained(lambda: home.checkpoints):
        if manifest.model.init is None or checkpoints_in(home.checkpoints):
            return
    for pause_s in backoff(*PAUSE_S):
        try:
            local_weights(manifest, home.files, place, download)
            return
        except HubUnavailableError as error:
            notebook.note("waiting", why=error.problem.rstrip("."), seconds=pause_s, remedy=error.remedy)
            nap(pause_s)
