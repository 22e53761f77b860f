"""Files of the weights from which a run begins: where they are on this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.base import files
from p2ptrain.base.errors import WeightsError
from p2ptrain.base.text import one_line, printable
from p2ptrain.data.file_store import MOST_STORED_BYTES, FileStore, NamedFile, named_weights
from p2ptrain.data.hub_weights import INDEX, MAX_INDEX_BYTES, SINGLE, download_weights, shard_names
from p2ptrain.data.sources import file_digest, unchanged

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest


def check_option(manifest: Manifest, place: Path | None) -> None:
    """Raise WeightsError if the owner names weights, and the run begins from none or from those of the hub."""
    init = manifest.model.init
    if place is not None and (init is None or init.kind != "file"):
        found = "random ones" if init is None else f"those of {init.name} of the hub"
        raise WeightsError(
            f"--weights names {place}, but this run's initial weights are {found}.",
            "Omit --weights. To begin from that model, begin another run: p2ptrain init NEW_RUN --model PATH",
        )


def local_weights(
    manifest: Manifest,
    store: FileStore,
    place: Path | None,  # file or folder that the owner named
    download: Callable[[NamedFile], bytes | None] = lambda file: None,  # returns what a peer sent; None if none has it
) -> list[Path]:
    """Return the files of the run's initial weights, in order; those of the hub are downloaded if need be.

    Files that the run names by digest are stored if all are small enough to travel, so that other peers get them.
    Raises WeightsError if files are missing, HubUnavailableError if that may pass, CorpusError or HomeError if one
    cannot be read or stored.
    """
    init = manifest.model.init
    assert init is not None, "the run begins from random weights"
    if init.kind == "hub":
        return download_weights(init.name, init.revision, manifest.model)
    named = named_weights(manifest)
    found = find_named(named, store, place)
    for file in named:
        if file.sha256 not in found and (data := download(file)) is not None:
            found[file.sha256] = store.add(file.sha256, data)
    if missing := [each for each in named if each.sha256 not in found]:
        raise _absent(missing)
    adopt(named, found, store)
    return [found[each.sha256] for each in named]


def find_named(named: Sequence[NamedFile], store: FileStore, place: Path | None) -> dict[str, Path]:
    """Return the paths of those files that are stored, or in the owner's file or folder, by digest.

    Raises WeightsError or CorpusError if the owner's place cannot be read.
    """
    paths = {each.sha256: store.find(each.sha256) for each in named}
    found = {sha256: path for sha256, path in paths.items() if path is not None}
    if place is not None and len(found) < len(paths):
        for path in _candidates(place, paths.keys()):
            if len(found) < len(paths) and (digest := file_digest(path, "weights file")) in paths:
                found.setdefault(digest, path)
    return found


def _absent(missing: Sequence[NamedFile]) -> WeightsError:
    """Return the error of files that are not on this machine, and that no peer sends."""
    names = ", ".join(f"{each.what} (sha256 {each.sha256[:12]}…)" for each in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return WeightsError(
        f"This run begins from published weights, of which this machine lacks {names}{more}.",
        "Get the safetensors files from the run's author or where they were published, and pass the file or its folder "
        f"with {missing[0].option} PATH.",
    )


def adopt(named: Sequence[NamedFile], found: dict[str, Path], store: FileStore) -> bool:
    """Store the files if all together are small enough to travel; return whether they are. Raises CorpusError."""
    if sum(_size(path) for path in found.values()) > MOST_STORED_BYTES:
        return False
    return all(store.adopt(each, found[each.sha256]) is not None for each in named)


def published_files(place: Path) -> list[Path]:
    """Return the safetensors files of a model in a file or a folder, shards in order. Raises WeightsError."""
    if place.is_file():
        return [place]
    if (place / SINGLE).is_file():
        return [place / SINGLE]
    index = place / INDEX
    if index.is_file():
        try:
            with unchanged(index):
                if _size(index) > MAX_INDEX_BYTES:
                    raise ValueError(f"it is larger than {MAX_INDEX_BYTES:,} bytes")
                return [place / name for name in shard_names(index.read_bytes())]
        except (OSError, ValueError) as error:
            why = files.cause(error) if isinstance(error, OSError) else one_line(str(error), 120)
            raise WeightsError(f"{index} cannot be used: {why}.", "Get the model's folder again.") from None
    raise WeightsError(
        f"{printable(place)} has neither {SINGLE} nor {INDEX}, and pickles such as pytorch_model.bin are never loaded.",
        "Name a safetensors file itself. Convert pickles where you trust them: load them with transformers and call "
        "save_pretrained.",
    )


def _candidates(place: Path, digests: Collection[str]) -> list[Path]:
    """Return the files that may be the named ones: the owner's file, or those of the folder with a likely name."""
    if not place.is_dir():
        return [place]
    try:
        inside = sorted(place.iterdir())
    except OSError as error:
        raise WeightsError(f"{place} cannot be read: {files.cause(error)}.", files.remedy(error, "")) from error
    return [path for path in inside if (path.suffix == ".safetensors" or path.name in digests) and path.is_file()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading it reports the cause
        return 0
