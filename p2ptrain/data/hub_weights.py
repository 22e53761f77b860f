"""Weights and other files of a model on the Hugging Face hub, in the cache of the hub's client."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from p2ptrain.base.errors import WeightsError
from p2ptrain.base.text import one_line, printable
from p2ptrain.data.hub import check_disk, huggingface_hub
from p2ptrain.manifest.initial_weights import MAX_WEIGHT_FILES
from p2ptrain.manifest.model import parameter_count
from p2ptrain.manifest.section import HUB_NAME

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names that transformers gives to weights in one file, and to the list of shards."""

MAX_INDEX_BYTES = 4 << 20
"""Maximum size of an index: a line of 100 bytes for each tensor of the largest model that a manifest allows."""

LONGEST_MASK = 2048
"""Positions of the causal masks that files of GPT-2 and GPT-NeoX hold beside the weights: those of Pythia."""

HEADER_BYTES = 4 << 20
"""Room for a file's header; 256 layers of 20 tensors, as large as a manifest allows, take 0.8 MB."""

OTHER_MODEL = (
    "Get config.json and weights of one model, at one revision, and do not edit [model]. If the run is not yours, ask "
    "its author."
)
"""Remedy where a model's sizes and its weights do not belong together."""

_SMALLER = "Choose another model."
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.safetensors")
"""Name of a shard in an index, which is a stranger's: no path."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubUnavailableError(WeightsError):
    """The hub did not answer, asks to wait or sent a damaged file: a later attempt may succeed."""


def download_weights(name: str, revision: str, model: Decoder) -> list[Path]:
    """Return the safetensors files of a repository, shards in order; download those that are not here.

    Raises:
        HubUnavailableError: a later attempt may succeed; it downloads what is missing.
        WeightsError: the hub refuses, or has no safetensors files of a model of this size.
        HomeError: the cache cannot be written.
    """
    what = f"{name} at revision {revision}"
    whole = [SINGLE]
    if _size_bytes(name, revision, SINGLE) is None:
        listed = fetch(name, revision, INDEX, MAX_INDEX_BYTES)
        if listed is None:
            raise WeightsError(
                f"{what} has neither {SINGLE} nor {INDEX}, and pickles such as pytorch_model.bin are never loaded.",
                "Choose a model with safetensors files, or convert this one where you trust it: load it with "
                "transformers and call save_pretrained.",
            )
        try:
            whole = shard_names(listed.read_bytes())
        except ValueError as error:
            raise WeightsError(f"{INDEX} of {what} cannot be used: {error}.", "Choose another model.") from None
    sizes = [_size_bytes(name, revision, each) for each in whole]
    for each, size_bytes in zip(whole, sizes, strict=True):
        if size_bytes is None:
            raise WeightsError(
                f"{each} of {what} is missing on the Hugging Face hub.",
                "Choose another model before the run is signed. If the run is not yours, ask its author.",
            )
    total = sum(size_bytes or 0 for size_bytes in sizes)
    if total > (most := most_bytes(model)):
        raise WeightsError(
            f"The weights of {what} have {total:,} bytes, but those of the described model take at most {most:,}.",
            OTHER_MODEL,
        )
    found = [fetch(name, revision, each) for each in whole]
    return [path for path in found if path is not None]


def shard_names(index: bytes) -> list[str]:
    """Return the names of the files that an index lists, each once, in order. Raises ValueError."""
    try:
        listed = json.loads(index)["weight_map"].values()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("it lists no shards") from None
    names = sorted({name for name in listed if isinstance(name, str) and _SHARD.fullmatch(name)})
    if len(names) != len({str(name) for name in listed}) or not 0 < len(names) <= MAX_WEIGHT_FILES:
        raise ValueError(f"it must list 1 to {MAX_WEIGHT_FILES} safetensors files of its own folder")
    return names


def commit_of(name: str, revision: str, kind: Literal["model", "dataset"] = "model") -> str:
    """Return the commit of a repository, asking the hub for a branch or, if ``revision`` is empty, the newest.

    Raises WeightsError.
    """
    if not re.fullmatch(HUB_NAME, name):
        raise WeightsError(
            f"{printable(name)!r} is not a {kind} of the Hugging Face hub.", "Name it as hf:OWNER/NAME[@REVISION]."
        )
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        found = str(huggingface_hub().HfApi().repo_info(name, repo_type=kind, revision=revision or None).sha)
    except Exception as error:  # also errors of the HTTP library that the client uses
        place = name if kind == "model" else f"datasets/{name}"
        raise explained(error, "the description", f"{place} at revision {revision or 'main'}") from error
    if not _COMMIT.fullmatch(found):
        raise WeightsError(
            f"The Hugging Face hub names no commit of {name}.", "Name a full commit: hf:OWNER/NAME@REVISION"
        )
    return found


def most_bytes(model: Decoder) -> int:
    """Return the most bytes that files of a model's weights take: all in fp32, the tied embedding twice, and masks."""
    config = model.config
    weights = parameter_count(model) + config.vocab_size * config.hidden_size
    masks = config.num_hidden_layers * min(config.max_position_embeddings, LONGEST_MASK) ** 2
    return 4 * (weights + masks) + MAX_WEIGHT_FILES * HEADER_BYTES


def fetch(name: str, revision: str, file: str, most_bytes: int | None = None) -> Path | None:
    """Return a file of a model at a commit, from the cache if it is there; None if the model has none of that name.

    Raises:
        HubUnavailableError: a later attempt may succeed.
        WeightsError: the hub refuses, or the file is larger than ``most_bytes``.
        HomeError: the cache cannot be read or written.
    """
    what = f"{file} of {name} at revision {revision}"
    size_bytes = _size_bytes(name, revision, file)
    if size_bytes is None:
        return None
    if most_bytes is not None and size_bytes > most_bytes:
        raise WeightsError(f"{what} has {size_bytes:,} bytes, and at most {most_bytes:,} are read.", _SMALLER)
    path = Path(_client(name, revision, file))
    blob = path.resolve()  # which the client names by its digest, a SHA-256 if the file is large
    if _SHA256.fullmatch(blob.name):
        try:
            with blob.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != blob.name:
                path.unlink()
                blob.unlink(missing_ok=True)
        except OSError as error:
            check_disk(error, what)
            raise
        if found != blob.name:
            raise HubUnavailableError(
                f"The download of {printable(what)} is damaged: its sha256 is {found}, not {blob.name}.",
                "Start again: it is downloaded anew. If that fails, too, tell the model's publisher.",
            )
    return path


def _size_bytes(name: str, revision: str, file: str) -> int | None:
    """Return a file's size; None if there is none. Raises WeightsError, also if the hub does not tell the size."""
    found = _client(name, revision, file, dry_run=True)
    if found is not None and found.file_size is None:
        raise WeightsError(f"The Hugging Face hub does not tell the size of {file} of {name}.", _SMALLER)
    return None if found is None else int(found.file_size)


def _client(name: str, revision: str, file: str, **options: Any) -> Any:
    """Call ``hf_hub_download``; return None if there is no such file. Raises WeightsError and HomeError."""
    hub = huggingface_hub()
    try:
        return hub.hf_hub_download(name, file, revision=revision, **options)
    except hub.errors.RemoteEntryNotFoundError:
        return None
    except Exception as error:  # also errors of the HTTP library that the client uses
        check_disk(error, f"{file} of {name}")
        raise explained(error, file, f"{name} at revision {revision}") from error


def explained(error: Exception, name: str, what: str) -> WeightsError:
    """Return a sentence for an error of the client, by the hub's status.

    Args:
        name: of the file that was asked for.
        what: model and revision.
    """
    hub = huggingface_hub()
    causes = [*_causes(error)]
    statuses = (getattr(getattr(each, "response", None), "status_code", None) for each in causes)
    status = next((each for each in statuses if isinstance(each, int)), None)
    if any(isinstance(each, hub.errors.OfflineModeIsEnabled) for each in causes):
        return WeightsError(
            f"HF_HUB_OFFLINE is set, and {name} of {what} is not on this machine.",
            "Unset HF_HUB_OFFLINE for the first start, or download the model before.",
        )
    if status in (401, 403, 404):
        return WeightsError(
            f"The Hugging Face hub does not give {what} to you (status {status}): it is private, asks for "
            "consent to its terms, or does not exist.",
            f"Open huggingface.co/{what.partition(' ')[0]}, accept its terms if it asks for that, log in with "
            "`hf auth login`, and start again. If it is not there, check name and revision before the run is signed.",
        )
    return HubUnavailableError(
        f"{name} of {what} could not be downloaded from the Hugging Face hub ({one_line(str(causes[-1]), 160)}).",
        "Check the internet connection (and HF_ENDPOINT if set), or wait, then start again: files that are complete "
        "are kept.",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; the last one is the first that happened."""
    while error is not None:
        yield error
        error = error.__cause__
