"""Files that the run names by digest, and shards of its text, which the bootstrap serves to peers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.data.file_store import (
    FILES_FOLDER,
    INDEX,
    MOST_STORED_BYTES,
    SETTINGS,
    WEIGHTS_OPTION,
    FileStore,
    named_files,
    named_weights,
)
from p2ptrain.data.unfinished import SHARDS_FOLDER
from p2ptrain.data.weight_files import adopt, check_option, find_named
from p2ptrain.manifest import SignedManifest, advice
from p2ptrain.net.shard_service import OF_A_BOOTSTRAP, QUEUE_S, ShardServer
from p2ptrain.net.throttle import Throttles
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.store import ShardStore

if TYPE_CHECKING:
    from bootstrap.app import BootstrapOptions, Say

MOST_STORED = f"{MOST_STORED_BYTES >> 20} MiB"


def files_to_serve(options: BootstrapOptions, signed: SignedManifest, say: Say) -> dict[str, Path]:
    """Return the files to serve, by SHA-256, after storing the weights that the owner gave.

    Raises CorpusError, WeightsError, ManifestError and HomeError.
    """
    store, found, missing = FileStore(options.run / FILES_FOLDER), dict[str, Path](), list[str]()
    for warning in advice(signed.manifest):
        say("bootstrap", f"warning: {warning}")
    for file in named_files(signed.manifest):
        if file.option == WEIGHTS_OPTION:
            continue
        stored = store.find(file.sha256)
        if stored is not None:
            found[file.sha256] = stored
        elif file.what == SETTINGS:
            say("bootstrap", "the continued model's settings are not here: exports will lack its chat template")
        else:
            missing.append(file.what)
    if missing:
        say(
            "bootstrap",
            f"{options.run / FILES_FOLDER} lacks the run's {' and '.join(missing)}, which peers then cannot get here:"
            f" copy {FILES_FOLDER} and {SHARDS_FOLDER} from the author's run folder to {options.run}",
        )
    return found | _weights(options, signed, store, say)


def shards_to_serve(
    run: Path, signed: SignedManifest, files: dict[str, Path], rates: Throttles, say: Say
) -> ShardServer | None:
    """Return the server of the run's text; None if it ships with the package, or its index is not here.

    Raises CorpusError if the index is none.
    """
    corpus = signed.manifest.corpus
    if corpus.kind != "shards" or corpus.root not in files:
        return None
    try:
        index = ShardIndex.from_bytes(files[corpus.root].read_bytes())
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"{files[corpus.root]} is no {INDEX} of a text: {error}.", "Write the run again with p2ptrain init."
        ) from error
    store = ShardStore(run / SHARDS_FOLDER)
    held = len(store.held(index))
    if held < len(index.digests):
        say(
            "bootstrap",
            f"{held:,} of the text's {len(index.digests):,} shards are in {store.directory}, and peers get the others"
            f" from each other or a mirror, if these have them; else copy {SHARDS_FOLDER} from the author's run folder",
        )
    return ShardServer(index, store, rates, overall=OF_A_BOOTSTRAP, queue_s=QUEUE_S)


async def check_shards(server: ShardServer, say: Say) -> None:
    """Look for shards that were damaged on this disk, which are then not served, and tell the owner."""
    store = server.store
    for digest in [each for each in server.digests if store.has(each)]:
        try:
            is_whole = await asyncio.to_thread(store.is_whole, digest)
        except HomeError as error:  # too many open files, for example, which says nothing about the shard
            say("bootstrap", error.problem)
            continue
        if not is_whole and store.has(digest):
            server.leave_out(digest)
            say(
                "bootstrap",
                f"{store.path(digest)} is damaged, and peers do not get it here: copy it from the author's run folder"
                " and start the bootstrap again",
            )


def _weights(options: BootstrapOptions, signed: SignedManifest, store: FileStore, say: Say) -> dict[str, Path]:
    """Check and store initial weights that are small enough to travel; return those to serve."""
    check_option(signed.manifest, options.weights)
    named = named_weights(signed.manifest)
    found = find_named(named, store, options.weights)
    if not named:
        return {}
    if len(found) < len(named):
        say("bootstrap", f"the run's weights are not here; start with {WEIGHTS_OPTION} PATH once, and peers get them")
        return {}
    if not adopt(named, found, store):
        say("bootstrap", f"the weights are larger than {MOST_STORED}: each peer needs {WEIGHTS_OPTION} PATH")
        return {}
    say("bootstrap", "peers that lack the run's weights get them here")
    stored = {each.sha256: store.find(each.sha256) for each in named}
    return {sha256: path for sha256, path in stored.items() if path is not None}
