"""Data sets of the Hugging Face hub: the files of one split at a revision, downloaded when they are read.

The ``datasets`` library is not used: it turns late values that are not text into text, and tells a server which data
set is read. Files are found as it finds them (https://huggingface.co/docs/hub/datasets-data-files-configuration): by
the ``configs`` of the data set's card, else by names of files and folders.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.base.text import one_line
from p2ptrain.data.rows import names
from p2ptrain.data.sources import InterruptedCorpusError

MAX_CARD_BYTES = 1 << 20
"""Maximum size of a data set's README.md. Guess: the longest cards of the hub would settle it."""

MAX_PATTERN_CHARS = 200
"""Maximum length of a pattern of the card. Guess: the patterns of the hub's most downloaded data sets."""

SPLIT_KEYWORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
"""Words in names of files or folders that put these into a split (``datasets.data_files.SPLIT_KEYWORDS``)."""

NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
"""Names that are never data (``datasets.data_files.FILES_TO_IGNORE``)."""

NO_DATA_SUFFIXES = {"", ".md", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".bib", ".cff", ".png", ".jpg", ".svg"}
"""Suffixes of documentation and programs in repositories of text; other files of a split are read or refused."""

PACKED = (".gz", ".bz2", ".xz", ".zst")
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}

_NAME_FILES = "Name configuration and split as the data set's page does: --corpus hf:OWNER/NAME:CONFIG:SPLIT"


class HubText(NamedTuple):
    """Split of a data set at a revision."""

    name: str
    """owner/name."""
    revision: str
    """Full commit."""
    config: str = "default"
    """Configuration, also called subset. (default: the hub's name of an unnamed one.)"""
    split: str = "train"
    """Split. (train: the usual name on the hub.)"""

    @property
    def title(self) -> str:
        """Name in messages."""
        return f"{self.name} (configuration {self.config}, split {self.split}, revision {self.revision})"


def huggingface_hub() -> Any:
    """Import the hub's client without its telemetry; done late because it takes a second."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    import huggingface_hub
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # transformers may have imported it before
    return huggingface_hub


@dataclass(frozen=True, slots=True)
class HubFile:
    """File of a data set at a revision."""

    text: HubText
    path: str
    size: int

    def __str__(self) -> str:
        return self.path

    @property
    def identity(self) -> list[Any]:
        """What changes if the file does."""
        return [self.text.name, self.text.revision, self.path]

    @property
    def format(self) -> str:
        """``jsonl`` or ``parquet``; "" for other files."""
        name = PurePosixPath(self.path)
        return FORMATS.get(name.with_suffix("").suffix if name.suffix in PACKED else name.suffix, "")

    def open(self, mode: Literal["rb"] = "rb") -> IO[bytes]:
        """Open the file in the cache of the hub's client, which downloads it. Raises InterruptedCorpusError."""
        return _downloaded(self.text, self.path).open(mode)


def split_files(spec: HubText) -> list[HubFile]:
    """Return the files of the run's configuration and split, in the order in which they are read.

    Raises:
        InterruptedCorpusError: the hub does not list them.
        HomeError: the cache of the hub's client cannot be written.
        CorpusError: the card or the names do not say plainly which files these are, or they are neither jsonl nor
            parquet.
    """
    with hub_errors(spec.title):
        tree = (
            huggingface_hub()
            .HfApi()
            .list_repo_tree(spec.name, recursive=True, revision=spec.revision, repo_type="dataset")
        )
        sizes = {each.path: int(each.size) for each in tree if hasattr(each, "size")}
    if sizes.get("README.md", 0) > MAX_CARD_BYTES:
        raise _unclear(f"its README.md is larger than {MAX_CARD_BYTES:,} bytes", spec)
    card = _downloaded(spec, "README.md").read_text("utf-8-sig", "replace") if "README.md" in sizes else ""
    found = [HubFile(spec, path, sizes[path]) for path in split_paths(card, [*sizes], spec)]
    for each in found:
        if not each.format:
            raise CorpusError(
                f"The data set {spec.name} holds {one_line(each.path)}, and only jsonl and parquet can be read.",
                "Name the commit of the hub's own conversion, hf:OWNER/NAME@REVISION: git ls-remote "
                f"https://huggingface.co/datasets/{spec.name} refs/convert/parquet",
            )
    return found


def _downloaded(spec: HubText, path: str) -> Path:
    with hub_errors(spec.title):
        found = huggingface_hub().hf_hub_download(spec.name, path, repo_type="dataset", revision=spec.revision)
    return Path(found)


@contextlib.contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Turn all errors of the hub's client into InterruptedCorpusError, and those of the disk into HomeError.

    ``where`` names the data set in messages.
    """
    try:
        yield
    except Exception as error:  # also errors of the HTTP library that it uses
        check_disk(error, where)
        raise InterruptedCorpusError(
            f"The corpus {where} could not be downloaded from the Hugging Face hub "
            f"({one_line(f'{type(error).__name__}: {error}')}).",
            "Check the internet connection (and HF_ENDPOINT, HF_HUB_OFFLINE if set), and that the data set is public "
            "or you are logged in (`hf auth login`); then give the same command again, which goes on where it was.",
        ) from error


def check_disk(error: Exception, what: str) -> None:
    """Raise HomeError if an error of the hub's client is one of the disk that holds its cache."""
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        problem = f"{what} cannot be kept in the hub's cache: {files.cause(error)}."
        raise HomeError(problem, files.remedy(error, "set HF_HOME to another directory")) from error


def split_paths(card: str, paths: Sequence[str], spec: HubText) -> list[str]:
    """Return the paths of a split, each once, in order.

    Args:
        card: README.md; "" if there is none.
        paths: all files of the data set.

    Raises CorpusError if card and names do not say plainly which ones they are.
    """
    from fsspec.utils import glob_translate

    data = sorted(path for path in paths if _is_data(path))
    configs = _configs(card, spec)
    if not configs:
        converted = [path for path in data if path.startswith(f"{spec.config}/{spec.split}/")]
        if converted or spec.config == "default":
            return converted or _by_names(data, spec)
    chosen = configs.get(spec.config)
    if chosen is None:
        listed = names(configs) or "'default' alone"
        raise CorpusError(f"The data set {spec.name} has no configuration {spec.config!r}, but {listed}.", _NAME_FILES)
    folder = _text(chosen.get("data_dir")).strip("/")
    inside = {path.removeprefix(f"{folder}/"): path for path in data if not folder or path.startswith(f"{folder}/")}
    if chosen.get("data_files") is None:
        return [inside[path] for path in _by_names([*inside], spec)]
    try:
        patterns = _patterns(chosen["data_files"], spec)
        if any(len(each) > MAX_PATTERN_CHARS or each.count("**") > 2 for each in patterns):  # slow to match
            raise ValueError("a pattern is too long or has too many **")
        forms = [re.compile(glob_translate(pattern)) for pattern in patterns]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _unclear(f"its card's data_files cannot be used ({one_line(str(error), 80)})", spec) from error
    found = [inside[path] for form in forms for path in inside if form.match(path)]
    if not found:
        raise CorpusError(f"No file of the data set {spec.name} matches {names(patterns)}.", _NAME_FILES)
    return list(dict.fromkeys(found))


def _is_data(path: str) -> bool:
    parts = path.split("/")
    is_named = parts[-1] not in NOT_DATA and PurePosixPath(path).suffix not in NO_DATA_SUFFIXES
    return is_named and not any(part.startswith((".", "__")) for part in parts)


def _configs(card: str, spec: HubText) -> dict[str, Mapping[str, Any]]:
    """Return the configurations of a card, by name; empty if it has none."""
    if not card.lstrip().startswith("---"):
        return {}
    try:
        listed = huggingface_hub().DatasetCard(card).data.to_dict().get("configs") or []
        return {_text(each.get("config_name", "default")): each for each in listed}
    except Exception as error:  # of YAML, which the library does not catch, or another shape
        raise _unclear(f"its README.md cannot be read ({one_line(str(error))})", spec) from error


def _patterns(data_files: Any, spec: HubText) -> list[str]:
    """Return the patterns of the split in the ``data_files`` of a card. Raises whatever another shape leads to."""
    if isinstance(data_files, str) or (isinstance(data_files, list) and isinstance(data_files[0], str)):
        data_files = {"train": data_files}
    if isinstance(data_files, list):
        data_files = {_text(each["split"]): each["path"] for each in data_files}
    if spec.split not in data_files:
        raise CorpusError(
            f"The configuration {spec.config!r} of {spec.name} has no split {spec.split!r}, but {names(data_files)}.",
            _NAME_FILES,
        )
    found = data_files[spec.split]
    return [each.removeprefix("./") for each in ([found] if isinstance(found, str) else found)]


def _text(value: object) -> str:
    """Return a string of a card; "" for another type, whose text may be of any size, since YAML has references."""
    return value if isinstance(value, str) else ""


def _by_names(paths: Sequence[str], spec: HubText) -> list[str]:
    """Return the paths whose names put them into the split: as ``data/SPLIT-00000-of-00001``, or by the hub's words.

    Words in names of folders come before those of files; without any, all files are ``train``.
    """
    sharded = {path: {found[1]} for path in paths if (found := re.match(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*$", path))}
    by_folder = {path: _splits_in(path.split("/")[:-1]) for path in paths}
    by_file = {path: _splits_in(path.split("/")[-1:]) for path in paths}
    levels = (sharded, by_folder, by_file, {path: {"train"} for path in paths})
    splits: dict[str, set[str]] = next((level for level in levels if any(level.values())), {})
    if unclear := next((path for path, found in splits.items() if len(found) > 1 and spec.split in found), None):
        raise _unclear(f"the name {one_line(unclear)} puts a file into several splits", spec)
    chosen = [path for path, found in splits.items() if spec.split in found]
    if not chosen:
        listed = names(sorted(set().union(*splits.values()))) or "no data"
        raise CorpusError(f"The data set {spec.name} has no split {spec.split!r}, but {listed}.", _NAME_FILES)
    return chosen


def _splits_in(parts: Sequence[str]) -> set[str]:
    words = {word for part in parts for word in re.split(r"[-._ 0-9]+", part)}
    return {split for split, keywords in SPLIT_KEYWORDS.items() if words & keywords}


def _unclear(why: str, spec: HubText) -> CorpusError:
    return CorpusError(
        f"Which files of the data set {spec.name} are its split {spec.split!r} is unclear: {why}.",
        "Choose another data set, or download its files and name them: --corpus FOLDER",
    )
