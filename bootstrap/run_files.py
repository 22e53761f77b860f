"""Files that the run names by digest and that the bootstrap serves to peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.base.text import first_sentence, printable
from p2ptrain.data.early import check_text
from p2ptrain.data.file_store import (
    FILES_FOLDER,
    MOST_STORED_BYTES,
    WEIGHTS_OPTION,
    FileStore,
    named_files,
    named_weights,
)
from p2ptrain.data.weight_files import adopt, check_option, find_named
from p2ptrain.manifest import SignedManifest, advice

if TYPE_CHECKING:
    from bootstrap.app import BootstrapOptions, Say

MOST_STORED = f"{MOST_STORED_BYTES >> 20} MiB"


def files_to_serve(options: BootstrapOptions, signed: SignedManifest, say: Say) -> dict[str, Path]:
    """Check and store the files that the owner gave, and return those to serve, by SHA-256.

    Raises CorpusError, WeightsError, ManifestError and HomeError.
    """
    store, found = FileStore(options.run / FILES_FOLDER), {}
    given = {"corpus": options.data, "tokenizer": options.tokenizer, "template": options.template}
    named = [file for file in named_files(signed.manifest) if file.option != WEIGHTS_OPTION]
    here = given | {file.what: given.get(file.what) or store.find(file.sha256) for file in named}
    for warning in advice(signed.manifest):
        say("bootstrap", f"warning: {warning}")
    for warning in check_text(signed.manifest, here["corpus"], here["tokenizer"], here["template"]):
        say("bootstrap", printable(f"warning: {first_sentence(warning)}"))
    for file in named:
        path = given.get(file.what)
        is_large = path is not None and store.adopt(file, path) is None
        stored = store.find(file.sha256)
        if stored is not None:
            found[file.sha256] = stored
            say("bootstrap", f"peers that lack the run's {file.what} get it here")
        elif is_large:
            say("bootstrap", f"the {file.what} is larger than {MOST_STORED}: each peer needs {file.option} FILE")
        elif not file.option:
            say("bootstrap", "the continued model's settings are not here: exports will lack its chat template")
        else:
            say("bootstrap", f"the run's {file.what} is not here; start with {file.option} FILE once, and peers get it")
    return found | _weights(options, signed, store, say)


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
