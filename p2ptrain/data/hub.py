"""Data sets of the Hugging Face hub: the files of one split at a revision, and reading them over the network.

The ``datasets`` library is not used: it turns late values that are not text into text, and tells a server which data
set is read. Files are found as it finds them (https://huggingface.co/docs/hub/datasets-data-files-configuration): by
the ``configs`` of the data set's card, else by names of files and folders. Card and names come from strangers.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line
from p2ptrain.data.rows import names

MAX_CARD_BYTES = 1 << 20
"""Maximum size of a data set's README.md. Guess: the longest cards of the hub would settle it."""

MAX_PATTERN_CHARS = 200
"""Maximum length of a pattern of the card. Guess: the patterns of the hub's most downloaded data sets."""

READ_BYTES = 5 << 20
"""Bytes of one request to the hub: fsspec's ``DEFAULT_BLOCK_SIZE``."""

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


class HubFile:
    """File of a data set at a revision."""

    def __init__(self, filesystem: Any, root: str, path: str) -> None:
        self._filesystem = filesystem
        self._root = root
        self.path = path

    def __str__(self) -> str:
        return self.path

    @property
    def size(self) -> int:
        return int(self._filesystem.info(f"{self._root}/{self.path}")["size"])

    @property
    def identity(self) -> list[Any]:
        """What changes if the file does."""
        return [self._root, self.path]

    @property
    def format(self) -> str:
        """``jsonl`` or ``parquet``; "" for other files."""
        return _format(self.path)

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open for reading with random access. Raises what the hub's client raises, here and in ``read``."""
        file = self._filesystem.open(f"{self._root}/{self.path}", mode, cache_type="none")
        return io.BufferedReader(_WholeReads(file), READ_BYTES)


class _WholeReads(io.RawIOBase):
    """File of the hub in which an answer of the wrong length is an error, not the file's end."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._file.size - self._file.tell())
        data = self._file.read(wanted) if wanted > 0 else b""
        if len(data) != max(0, wanted):
            raise OSError(f"the hub sent {len(data):,} bytes instead of {wanted:,}")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def split_files(spec: HubText) -> list[HubFile]:
    """Return the files of the run's configuration and split, in the order in which they are read.

    Raises:
        CorpusError: the card or the names do not say plainly which files these are, or they are neither jsonl nor
            parquet. Other errors are the network's.
    """
    hub = huggingface_hub()
    filesystem = hub.HfFileSystem()
    root = f"datasets/{spec.name}@{spec.revision}"
    paths = [path.removeprefix(f"{root}/") for path in filesystem.find(root)]
    card = b""
    if "README.md" in paths:
        with HubFile(filesystem, root, "README.md").open() as file:
            card = file.read(MAX_CARD_BYTES + 1)
    if len(card) > MAX_CARD_BYTES:
        raise _unclear(f"its README.md is larger than {MAX_CARD_BYTES:,} bytes", spec)
    text = card.decode("utf-8-sig", errors="replace")
    files = [HubFile(filesystem, root, path) for path in split_paths(text, paths, spec)]
    for each in files:
        if not each.format:
            raise CorpusError(
                f"The data set {spec.name} holds {one_line(each.path)}, and only jsonl and parquet can be read.",
                "Name the commit of the hub's own conversion, hf:OWNER/NAME@REVISION: git ls-remote "
                f"https://huggingface.co/datasets/{spec.name} refs/convert/parquet",
            )
    return files


def split_paths(card: str, paths: Sequence[str], spec: HubText) -> list[str]:
    """Return the paths of a split, each once, in order.

    Args:
        card: README.md; "" if there is none.
        paths: all files of the data set.

    Raises CorpusError if card and names do not say plainly which ones they are.
    """
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
    folder = _text(chosen.get("data_dir") or "").strip("/")
    inside = {path.removeprefix(f"{folder}/"): path for path in data if not folder or path.startswith(f"{folder}/")}
    if chosen.get("data_files") is None:
        return [inside[path] for path in _by_names([*inside], spec)]
    patterns = _patterns(chosen["data_files"], spec)
    found = [inside[path] for pattern in patterns for path in inside if _matches(path.split("/"), pattern.split("/"))]
    if not found:
        raise CorpusError(f"No file of the data set {spec.name} matches {names(patterns)}.", _NAME_FILES)
    return list(dict.fromkeys(found))


def _format(path: str) -> str:
    name = PurePosixPath(path)
    return FORMATS.get(name.with_suffix("").suffix if name.suffix in PACKED else name.suffix, "")


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


def _patterns(data_files: object, spec: HubText) -> list[str]:
    """Return the patterns of the split in the ``data_files`` of a card."""
    if isinstance(data_files, str) or (
        isinstance(data_files, list) and all(isinstance(each, str) for each in data_files)
    ):
        data_files = {"train": data_files}
    if isinstance(data_files, list):
        pairs = [(_text(each.get("split")), each.get("path")) for each in data_files if isinstance(each, Mapping)]
    else:
        pairs = [(_text(split), path) for split, path in data_files.items()] if isinstance(data_files, Mapping) else []
    found = [value for split, value in pairs if split == spec.split]
    if not found:
        listed = names(dict.fromkeys(split for split, _ in pairs)) or "none"
        raise CorpusError(
            f"The configuration {spec.config!r} of {spec.name} has no split {spec.split!r}, but {listed}.", _NAME_FILES
        )
    patterns = []
    for pattern in (_text(each) for value in found for each in (value if isinstance(value, list) else [value])):
        if not pattern or len(pattern) > MAX_PATTERN_CHARS or pattern.count("**") > 2:
            raise _unclear(f"its card has the pattern {one_line(pattern, 80)!r}", spec)
        patterns.append(pattern.removeprefix("./"))
    return patterns


def _text(value: object) -> str:
    """Return a string of a card; "" for another type, whose text may be of any size, since YAML has references."""
    return value if isinstance(value, str) else ""


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a pattern, in which ``**`` stands for any number of folders."""
    if not pattern or not parts:
        return not parts and all(each == "**" for each in pattern)
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


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
