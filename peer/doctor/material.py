"""Checks of a run's manifest and of what it needs on this machine: packages, text and tokenizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.data.corpus import check_named, check_vocabulary, has_stream
from p2ptrain.data.file_store import MOST_STORED_BYTES, NamedFile, named_files, named_weights
from p2ptrain.data.sources import check_digest
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.data.unpacking import INSTALL_DATA
from p2ptrain.data.weight_files import check_option, find_named
from p2ptrain.manifest import Manifest, advice
from peer.doctor.findings import Finding, bad, note, ok
from peer.home import Home
from peer.initial_weights import needs_weights
from peer.owner.settings import Settings
from peer.start_options import StartFile

NOT_ASKED: Mapping[str, PeerId | None] = {}
"""Holders of the run's files if no node was asked: nothing is known of any file."""


def check_run(manifest: Manifest) -> Finding:
    """Report values of the manifest that its author can hardly have meant."""
    if warnings := advice(manifest):
        return note("run", "; ".join(warnings), "Only the run's author can change this, by signing another run.")
    return ok("run", f"{manifest.run.name}, {manifest.run.tokens:,} tokens of all peers together")


def check_packages(manifest: Manifest, cache: Path) -> Finding:
    """Check the optional packages that reading the run's text takes; none if its tokens are in the cache."""
    corpus = manifest.corpus
    is_parquet = corpus.kind == "hub" or (corpus.kind == "file" and corpus.format == "parquet")
    if not is_parquet or has_stream(manifest, cache):
        return ok("packages", "the run needs no optional package")
    if importlib.util.find_spec("pyarrow") is None:
        return bad("packages", "the run's text needs pyarrow, which is not installed", INSTALL_DATA)
    return ok("packages", "pyarrow installed")


def check_data(
    manifest: Manifest, cache: Path, home: Home, given: Path | None, holders: Mapping[str, PeerId | None] = NOT_ASKED
) -> Finding:
    """Check that the run's text, and its chat template, are here or can be had.

    Raises CorpusError if the given file is another one.
    """
    corpus = manifest.corpus
    named = {file.what: file for file in named_files(manifest)}
    check_named(manifest, given, None, is_built=False)
    if given is not None:
        check_digest(given, named["corpus"].sha256, "corpus")
    if "template" in named and _local(named["template"], home, None) is None:
        return _missing("data", named["template"], holders)
    if has_stream(manifest, cache):
        return ok("data", "the run's tokens are in the cache")
    if corpus.kind == "builtin":
        return ok("data", f"{corpus.name} comes with p2ptrain")
    if corpus.kind == "hub":
        return ok("data", f"{corpus.name} of the Hugging Face hub is downloaded at the first start")
    path = _local(named["corpus"], home, given)
    return _missing("data", named["corpus"], holders) if path is None else ok("data", f"{path} is the run's corpus")


def check_tokenizer(
    manifest: Manifest, home: Home, given: Path | None, holders: Mapping[str, PeerId | None] = NOT_ASKED
) -> Finding:
    """Check that the run's tokenizer is here or can be had, and that the model has an id for each of its tokens.

    Raises CorpusError if the given file is another one or unusable, ManifestError if it does not fit.
    """
    spec = manifest.tokenizer
    check_named(manifest, None, given, is_built=False)
    if spec.kind == "hub":
        return ok("tokenizer", f"that of {spec.name} of the Hugging Face hub is downloaded at the first start")
    path = None
    if spec.kind == "file":
        named = next(file for file in named_files(manifest) if file.what == "tokenizer")
        path = _local(named, home, given)
        if path is None:
            return _missing("tokenizer", named, holders)
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
    found = find_named(named, home.files, given or StartFile(home.path).load(Settings()).weights)
    missing = [_missing("weights", each, holders) for each in named if each.sha256 not in found]
    return missing or [ok("weights", "the run's initial weights are here")]


def _local(file: NamedFile, home: Home, given: Path | None) -> Path | None:
    """Return the path of a named file on this machine; None if there is none. Raises CorpusError for a wrong one."""
    if given is not None:
        check_digest(given, file.sha256, file.what)
        return given
    if (stored := home.files.find(file.sha256)) is not None:
        return stored
    remembered = StartFile(home.path).load(Settings())
    path = getattr(remembered, file.option.removeprefix("--"))
    if path is None:
        return None
    try:
        check_digest(path, file.sha256, file.what)
    except CorpusError:  # changed or removed since the last start
        return None
    return path


def _missing(check: str, file: NamedFile, holders: Mapping[str, PeerId | None]) -> Finding:
    """Report a file that is not here: the nodes of the link that were asked send it, lack it, or were not reached."""
    name = f"the {file.what} with sha256 {file.sha256[:12]}…"
    if (holder := holders.get(file.sha256)) is not None:
        return ok(check, f"{short(holder)} sends {name} at the first start; the link is all that is needed")
    if file.sha256 in holders:
        words = f"{name} is not here, and no node that was asked has it"
        return bad(check, words, f"Get it from the run's author and pass {file.option} FILE.")
    words = f"{name} is not here; peers send it if they have it"
    most = f"{MOST_STORED_BYTES >> 20} MiB"
    fix = f"If it is larger than {most} or no peer has it, get it from the run's author and pass {file.option} FILE."
    return note(check, words, fix)
