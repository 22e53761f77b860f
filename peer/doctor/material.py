"""Checks of a run's manifest and of what it needs on this machine: text, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from p2ptrain.base.ids import PeerId, short
from p2ptrain.data.checking import check_vocabulary
from p2ptrain.data.file_store import MOST_STORED_BYTES, NamedFile, named_weights
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.data.weight_files import check_option, find_named
from p2ptrain.manifest import Manifest, advice
from p2ptrain.net.start_options import OptionsFile
from p2ptrain.tokens.opened import open_corpus, user_store
from peer.doctor.findings import Finding, bad, note, ok
from peer.home import Home
from peer.initial_weights import needs_weights
from peer.start_options import StartOptions

NOT_ASKED: Mapping[str, PeerId | None] = {}
"""Holders of the run's files if no node was asked: nothing is known of any file."""


def check_run(manifest: Manifest) -> Finding:
    """Report values of the manifest that its author can hardly have meant."""
    if warnings := advice(manifest):
        return note("run", "; ".join(warnings), "Only the run's author can change this, by signing another run.")
    return ok("run", f"{manifest.run.name}, {manifest.run.tokens:,} tokens of all peers together")


def check_data(manifest: Manifest, home: Home, asked: Finding | None) -> Finding:
    """Check that the run's text is here or can be had.

    Args:
        asked: what other nodes and mirrors have sent; None if nobody was asked.

    Raises CorpusError or ManifestError for an index that does not fit the run.
    """
    corpus = manifest.corpus
    if corpus.kind != "shards":
        return ok("data", f"{corpus.name} comes with p2ptrain")
    if asked is not None:
        return asked
    index = home.files.find(corpus.root)
    if index is None:
        return note("data", "the run's text is not here; peers and the bootstrap send it at the first start")
    text = open_corpus(manifest, user_store(), index)
    held = len(text.store.held(text.index))
    return ok("data", f"{held:,} of the {len(text.index.digests):,} shards of the run's text are here")


def check_tokenizer(manifest: Manifest, home: Home, holders: Mapping[str, PeerId | None] = NOT_ASKED) -> Finding:
    """Check that the run's tokenizer is here or can be had, and that the model has an id for each of its tokens.

    Raises CorpusError if it is unusable, ManifestError if it does not fit.
    """
    spec, path = manifest.tokenizer, None
    if spec.kind == "file":
        path = home.files.find(spec.sha256)
        if path is None:
            return _missing("tokenizer", NamedFile("tokenizer", "", spec.sha256), holders)
    loaded = load_tokenizer(spec, path)
    check_vocabulary(manifest, loaded)
    fits = f"{loaded.vocabulary_size:,} ids, and the model has {manifest.model.config.vocab_size:,}"
    return ok("tokenizer", f"{path or 'one token per byte'}: {fits}")


def check_weights(
    manifest: Manifest, home: Home, given: Path | None, holders: Mapping[str, PeerId | None] = NOT_ASKED
) -> list[Finding]:
    """Check that the weights from which the run begins are here or can be had; nothing if it begins from random ones.

    Raises WeightsError or CorpusError if the given place cannot be read.
    """
    check_option(manifest, given)
    init = manifest.model.init
    if init is None:
        return []
    if not needs_weights(manifest, home):
        return [ok("weights", "a checkpoint in the home replaces the initial weights")]
    if init.kind == "hub":
        return [ok("weights", f"those of {init.name} of the Hugging Face hub are downloaded at the first start")]
    named = named_weights(manifest)
    found = find_named(named, home.files, given or OptionsFile(home.path, StartOptions).load().weights)
    missing = [_missing("weights", each, holders) for each in named if each.sha256 not in found]
    return missing or [ok("weights", "the run's initial weights are here")]


def _missing(check: str, file: NamedFile, holders: Mapping[str, PeerId | None]) -> Finding:
    """Report a file that is not here: the nodes of the link that were asked send it, lack it, or were not reached."""
    name = f"the {file.what} with sha256 {file.sha256[:12]}…"
    if (holder := holders.get(file.sha256)) is not None:
        return ok(check, f"{short(holder)} sends {name} at the first start; the link is all that is needed")
    if file.sha256 in holders:
        words = f"{name} is not here, and no node that was asked has it"
        if not file.option:
            return bad(check, words, "Ask the run's author to start the bootstrap on the whole run folder.")
        return bad(check, words, f"Get it from the run's author and pass {file.option} FILE.")
    words = f"{name} is not here; peers send it if they have it"
    if not file.option:
        return note(check, words)
    most = f"{MOST_STORED_BYTES >> 20} MiB"
    fix = f"If it is larger than {most} or no peer has it, get it from the run's author and pass {file.option} FILE."
    return note(check, words, fix)
