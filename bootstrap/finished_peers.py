"""Records of peers that trained to the run's end, kept in the DHT and on disk for those who come late.

Their peers have left, so that this node is often the only one that still has them; its memory ends with p2pd.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

from bootstrap.messages import Say
from p2ptrain.base import files
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.net.directory import MAX_FINISHED, DhtDirectory

logger = logging.getLogger(__name__)

KEEP_EVERY_S = 30.0
"""Interval between two comparisons of disk and DHT, and so the time after which a farewell survives SIGKILL;
access lists are looked up as often (``access_list_store.PERIOD_S``)."""

Records = dict[PeerId, tuple[bytes, float]]
"""For each finished peer its record as stored in the DHT, and its expiration time."""


class FinishedPeers:
    def __init__(self, path: Path, say: Say, wall: Callable[[], float] = wall) -> None:
        self._path = path
        self._say = say
        self._wall = wall

    async def keep(self, directory: DhtDirectory) -> None:
        """Store records of the file that the DHT lacks, and save those of the DHT, until cancelled.

        Saved records are stored before the first lookup, and later ones displace none: strangers' records would
        otherwise take their places at a restart.
        """
        known, found = self._load(), Records()
        while True:
            known = {peer: (sealed, until) for peer, (sealed, until) in known.items() if until > self._wall()}
            try:
                if missing := {peer: record for peer, record in known.items() if peer not in found}:
                    await directory.keep_sealed(missing)  # which rejects forged ones
                found = await directory.sealed_finished()
                if known.keys() < (merged := dict(list((known | found).items())[:MAX_FINISHED])).keys():
                    known = merged
                    self._save(known)
            except NetworkError as error:
                logger.info("finished peers: %s", error)
            await asyncio.sleep(KEEP_EVERY_S)

    def _load(self) -> Records:
        """Return the records of the file; a missing or damaged one counts as empty."""
        try:
            entries = json.loads(self._path.read_bytes())
            records = {PeerId(peer): (bytes.fromhex(sealed), float(until)) for peer, sealed, until in entries}
            return dict(list(records.items())[-MAX_FINISHED:])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read, so it starts empty: %s", self._path, error)
            return {}

    def _save(self, records: Records) -> None:
        entries = [[peer, sealed.hex(), until] for peer, (sealed, until) in records.items()]
        try:
            files.replace(self._path, json.dumps(entries).encode(), lasting=False)
        except OSError as error:
            self._say("bootstrap", f"the list of finished peers could not be saved: {error.strerror}")
