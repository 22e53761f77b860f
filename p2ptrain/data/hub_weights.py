"""Weights of a model on the Hugging Face hub, downloaded once for all peers of this user.

::

    ~/.cache/p2ptrain/weights/OWNER--NAME/REVISION/NAME    a whole file, whose SHA-256 is the one that the hub states
    ….sha256                                               that digest, by which a damaged file is noticed
    ….part                                                 the beginning of a file; the next attempt continues it

What the cache of the hub's client has at that revision is used from there. The client keeps no part of a file whose
transfer fails, so the parts are kept here, but for the last 10 MB before the failure.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError, OtherModelError, WeightsError
from p2ptrain.base.files import cache_directory
from p2ptrain.base.text import one_line, printable
from p2ptrain.data.hub import huggingface_hub
from p2ptrain.data.safetensors_header import MAX_HEADER_BYTES
from p2ptrain.data.shards import INDEX, MAX_INDEX_BYTES, SINGLE, shard_names
from p2ptrain.manifest.initial_weights import MAX_WEIGHT_FILES
from p2ptrain.manifest.model import parameter_count
from p2ptrain.manifest.section import HUB_NAME

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder

LONGEST_MASK = 2048
"""Positions of the causal masks that files of GPT-2 and GPT-NeoX hold beside the weights: those of Pythia."""

OTHER_MODEL = (
    "Set [model] to the sizes of these weights before the run is signed, as `p2ptrain init NEW_RUN --model` writes it. "
    "If the run is not yours, ask its author."
)
"""Remedy for a run whose model and initial weights do not belong together."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ONLINE = "Check the internet connection (and HF_ENDPOINT if set), then start again: what was downloaded is kept."


class HubUnavailableError(WeightsError):
    """The hub did not answer, asks to wait or sent a damaged file: a later attempt may succeed."""


def download_weights(name: str, revision: str, model: Decoder) -> list[Path]:
    """Return the safetensors files of a repository, shards in order; download those that are not here.

    Raises:
        HubUnavailableError: a later attempt may succeed, and continues.
        WeightsError: the hub refuses, or has no safetensors files of a model of this size.
        HomeError: the cache cannot be written.
    """
    repository = HubRepository(name, revision)
    whole = [SINGLE]
    if not repository.has(SINGLE):
        listed = repository.small_file(INDEX, MAX_INDEX_BYTES)
        if listed is None:
            raise WeightsError(
                f"{name} at revision {revision} has neither {SINGLE} nor {INDEX}, and pickles such as "
                "pytorch_model.bin are never loaded.",
                "Choose a model with safetensors files, or convert this one where you trust it: load it with "
                "transformers and call save_pretrained.",
            )
        try:
            whole = shard_names(listed)
        except ValueError as error:
            raise WeightsError(
                f"{INDEX} of {name} at revision {revision} cannot be used: {error}.", "Choose another model."
            ) from None
    sizes = [repository.size_bytes(each) for each in whole]
    if sum(sizes) > (most := most_bytes(model)):
        raise OtherModelError(
            f"The weights of {name} at revision {revision} have {sum(sizes):,} bytes, but those of the described model "
            f"take at most {most:,}.",
            OTHER_MODEL,
        )
    return [repository.fetch(each) for each in whole]


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
    return 4 * (weights + masks) + MAX_WEIGHT_FILES * MAX_HEADER_BYTES


class HubRepository:
    """Files of a model on the hub at a revision."""

    def __init__(self, name: str, revision: str) -> None:
        self._name = name
        self._revision = revision
        self._folder = cache_directory() / "weights" / name.replace("/", "--") / revision
        self._what = f"{name} at revision {revision}"
        self._metadata: dict[str, Any] = {}
        self._here: dict[str, Path] = {}
        """Files whose digest was found right."""

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name, here or on the hub. Raises WeightsError."""
        return self._local(name) is not None or self._asked(name) is not None

    def size_bytes(self, name: str) -> int:
        """Return a file's size. Raises WeightsError, also if there is none or the hub does not tell its size."""
        if (path := self._local(name)) is not None:
            return path.stat().st_size
        asked = self._asked(name)
        if asked is None or asked.size is None:
            why = "is missing" if asked is None else "has no stated size"
            raise WeightsError(
                f"{name} of {self._what} {why} on the Hugging Face hub.",
                "Choose another model before the run is signed. If the run is not yours, ask its author.",
            )
        return int(asked.size)

    def small_file(self, name: str, most: int) -> bytes | None:
        """Return a file's content; None if there is none. Raises WeightsError, also if it is larger than ``most``."""
        if not self.has(name):
            return None
        if (size := self.size_bytes(name)) > most:
            raise WeightsError(
                f"{name} of {self._what} has {size:,} bytes, and at most {most:,} are read.",
                "Choose another model.",
            )
        return self.fetch(name).read_bytes()

    def fetch(self, name: str) -> Path:
        """Return a file's path; download what is missing of it, and check its digest if the hub states one."""
        if (path := self._local(name)) is not None:
            return path
        size_bytes, path = self.size_bytes(name), self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name(f"{name}.lock")):  # one of several peers downloads
                if not path.is_file():
                    part = path.with_name(f"{name}.part")
                    sha256 = self._complete(name, part, size_bytes, self._asked(name).etag or "")
                    files.replace(_digest_file(path), sha256.encode())
                    files.sync(part)
                    part.replace(path)
        except OSError as error:
            if error.errno is None:  # an error of the hub's client
                raise explained(error, name, self._what) from error
            raise HomeError(f"{path} cannot be written: {files.cause(error)}.", files.remedy(error, "")) from error
        return path

    def _complete(self, name: str, part: Path, size_bytes: int, digest: str) -> str:
        """Download the rest of a file, and return the SHA-256 of all of it. Raises WeightsError, OSError.

        Args:
            digest: what the hub states of the file, a SHA-256 if it is large.
        """
        hub = huggingface_hub()
        from_byte = part.stat().st_size if part.is_file() else 0
        if from_byte > size_bytes:
            part.unlink()
            from_byte = 0
        if from_byte < size_bytes:
            with part.open("ab") as file:
                try:
                    hub.file_download.http_get(
                        self._url(name),
                        file,
                        resume_size=from_byte,
                        headers=hub.utils.build_hf_headers(),
                        expected_size=size_bytes,
                    )
                except Exception as error:  # also errors of the HTTP library that the client uses
                    if (
                        isinstance(error, OSError)
                        and error.errno is not None
                        and not isinstance(error, ConnectionError)
                    ):
                        raise
                    raise explained(error, name, self._what) from error
        with part.open("rb") as file:
            sent = hashlib.file_digest(file, "sha256").hexdigest()
        fault = ""
        if (found_bytes := part.stat().st_size) != size_bytes:
            fault = f"it has {found_bytes:,} bytes, not {size_bytes:,}"
        elif _SHA256.fullmatch(digest) and sent != digest:
            fault = f"its sha256 is {sent}, not {digest}"
        if fault:
            part.unlink()
            began = f", whose first {from_byte:,} bytes were here," if from_byte else ""
            raise HubUnavailableError(
                f"The download of {printable(name)} of {self._what}{began} is damaged: {fault}.",
                "Start again: all of it is downloaded anew. If that fails, too, tell the model's publisher.",
            )
        return sent

    def _url(self, name: str) -> str:
        url: str = huggingface_hub().hf_hub_url(self._name, name, revision=self._revision)
        return url

    def _local(self, name: str) -> Path | None:
        """Return a file that was downloaded before, by a peer or by other programs with the hub's client.

        One of ours that is damaged is removed.
        """
        own = self._folder / name
        if name not in self._here and own.is_file():
            if _digest_file(own).is_file() and _has_digest(own, _digest_file(own).read_text()):
                self._here[name] = own
            else:
                own.unlink()
        if name not in self._here:
            cached = huggingface_hub().try_to_load_from_cache(self._name, name, revision=self._revision)
            path = Path(cached) if isinstance(cached, str) else None
            if path is not None and _has_digest(path, path.resolve().name):  # its cache names files by their digests
                self._here[name] = path
        return self._here.get(name)

    def _asked(self, name: str) -> Any:
        """Return what the hub says of a file: size and etag; None if the repository has none of that name."""
        if name not in self._metadata:
            hub = huggingface_hub()
            try:
                self._metadata[name] = hub.get_hf_file_metadata(self._url(name))
            except hub.errors.RemoteEntryNotFoundError:
                self._metadata[name] = None
            except Exception as error:  # also errors of the HTTP library that the client uses
                raise explained(error, name, self._what) from error
        return self._metadata[name]


def _digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _has_digest(path: Path, digest: str) -> bool:
    """Return whether a file has the SHA-256; True also for the names of small files, which are none."""
    if not _SHA256.fullmatch(digest):
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest


def explained(error: Exception, name: str, what: str) -> WeightsError:
    """Return a sentence for an error of the client, by the hub's status.

    Args:
        name: of the file that was asked for.
        what: model and revision.
    """
    status = _status(error)
    if isinstance(error, huggingface_hub().errors.OfflineModeIsEnabled):
        return WeightsError(
            f"HF_HUB_OFFLINE is set, and {name} of {what} is not on this machine.",
            "Unset HF_HUB_OFFLINE for the first start, or download the model before.",
        )
    if status in (401, 403):
        return WeightsError(
            f"The Hugging Face hub does not give {what} to you (status {status}): it is private, asks for "
            "consent to its terms, or does not exist.",
            f"Open huggingface.co/{what.partition(' ')[0]}, accept its terms if it asks for that, log in with "
            "`hf auth login`, and start again.",
        )
    if status == 404:
        return WeightsError(
            f"The Hugging Face hub has no {what} (status 404).",
            "Check name and revision before the run is signed. If the run is not yours, ask its author.",
        )
    if status == 429:
        return HubUnavailableError(
            f"The Hugging Face hub asks to wait (status 429) before it sends {name} of {what}.",
            "Log in with `hf auth login` for higher limits, or wait; what was downloaded is kept.",
        )
    if status is not None and status >= 500:
        return HubUnavailableError(
            f"The Hugging Face hub fails (status {status}) and does not send {name} of {what}.",
            "Start again later: what was downloaded is kept.",
        )
    return HubUnavailableError(
        f"{name} of {what} could not be downloaded from the Hugging Face hub ({one_line(str(error), 160)}).",
        _ONLINE,
    )


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status that an error or one of its causes carries."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None
