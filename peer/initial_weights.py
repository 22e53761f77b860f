"""The weights from which a peer begins a run that names published ones; a checkpoint in its home replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from p2ptrain.base.backoff import PAUSE_S, backoff
from p2ptrain.base.daemon_thread import nap
from p2ptrain.base.errors import UserError, WeightsError
from p2ptrain.checkpoint import checkpoints_in, explained
from p2ptrain.data.file_store import NamedFile, named_weights
from p2ptrain.data.hub_weights import HubUnavailableError, download_weights
from p2ptrain.data.weight_files import absent, adopt, find_named, local_weights
from p2ptrain.manifest import Manifest
from p2ptrain.ports import Notebook
from p2ptrain.train.initial_weights import load_weights
from peer.home import Home


def needs_weights(manifest: Manifest, home: Home) -> bool:
    """Return whether a peer that starts in a home reads published weights: it has no checkpoint, whole or torn."""
    with explained(lambda: home.checkpoints):
        return manifest.model.init is not None and not checkpoints_in(home.checkpoints)


def provide_weights(
    manifest: Manifest, home: Home, place: Path | None, is_given: bool, download: Callable[[NamedFile], bytes | None]
) -> None:
    """See to it that the files of initial weights that the run names by digest are on this machine.

    Args:
        place: file or folder that the owner named.
        is_given: whether the owner named it now; one of an earlier start may have changed or vanished since.
        download: returns a file that a peer sent; None if none has it.

    Raises WeightsError if files are missing, CorpusError or HomeError if one cannot be read or stored.
    """
    named = named_weights(manifest)
    try:
        found = find_named(named, home.files, place)
    except UserError:
        if is_given:
            raise
        found = find_named(named, home.files, None)
    for file in named:
        if file.sha256 not in found and (data := download(file)) is not None:
            found[file.sha256] = home.files.add(file.sha256, data)
    if missing := [each for each in named if each.sha256 not in found]:
        raise absent(missing)
    adopt(named, found, home.files)  # so that other peers get them


def await_hub(manifest: Manifest, home: Home, notebook: Notebook) -> None:
    """Download the run's initial weights if they are on the hub; wait with backoff while it is unavailable.

    Raises WeightsError for what waiting does not heal.
    """
    init = manifest.model.init
    if init is None or init.kind != "hub" or not needs_weights(manifest, home):
        return
    for pause_s in backoff(*PAUSE_S):
        try:
            download_weights(init.name, init.revision, manifest.model)
            return
        except HubUnavailableError as error:
            notebook.note("waiting", why=error.problem.rstrip("."), seconds=pause_s, remedy=error.remedy)
            nap(pause_s)


def load_initial(manifest: Manifest, home: Home, place: Path | None, targets: Iterable[tuple[str, Tensor]]) -> None:
    """Replace random weights by those that the run names, if it names any. Raises UserError.

    Args:
        place: file or folder that the owner named.
        targets: the parameters by name, as ``train.initial_weights.load_weights`` takes them.
    """
    init = manifest.model.init
    if init is None:
        return
    try:
        paths = local_weights(manifest, home.files, place)
    except WeightsError as error:
        if needs_weights(manifest, home):
            raise
        raise WeightsError(
            f"Every checkpoint in {home.path} is damaged, and a new beginning fails: {error.problem}", error.remedy
        ) from error
    load_weights(manifest.model, paths, init.sha256 if init.kind == "file" else None, targets)
