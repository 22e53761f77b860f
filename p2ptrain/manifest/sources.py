"""The tokenizer and corpus sections: where text comes from and how it becomes tokens. Never a path.

A manifest was written by a stranger, so a file is named by its digest alone; the owner of the machine says in the
settings where it lies. What comes from the Hugging Face hub is pinned to a commit. Both sections may be written as one
short string, which the longer tables spell out::

    tokenizer = "bytes"                      corpus = "builtin:shakespeare"
    tokenizer = "hf:owner/name@<revision>"   corpus = "hf:owner/name@<revision>"
    tokenizer = "sha256:<digest>"            corpus = "sha256:<digest>"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from p2ptrain.manifest.section import Digest, HubName, Revision, Section, Word

BYTE_VOCABULARY = 256
"""Token ids of the byte tokenizer: one per value of a byte, no special tokens."""


class BytesTokenizer(Section):
    """UTF-8 bytes are the tokens: 256 ids, nothing to download. For others replace this whole table: docs/DATA.md."""

    kind: Literal["bytes"]
    """Where the tokenizer comes from: bytes, hub or file."""


class HubTokenizer(Section):
    """A tokenizer from the Hugging Face hub."""

    kind: Literal["hub"]
    """Where the tokenizer comes from: bytes, hub or file."""

    name: HubName
    """Repository on the hub, owner/name."""

    revision: Revision
    """Full commit hash, 40 hexadecimal digits; the repository's page lists it under "Files and versions"."""


class FileTokenizer(Section):
    """A tokenizer.json that each owner already has."""

    kind: Literal["file"]
    """Where the tokenizer comes from: bytes, hub or file."""

    sha256: Digest
    """SHA-256 of the tokenizer.json; each owner names the file itself on the command line."""


class _CorpusSection(Section):
    """What all corpora have."""

    kind: str
    """Where the text comes from: builtin, hub or file."""

    validation_fraction: float = Field(default=0.05, gt=0, le=0.5)
    """Share of the tokens held out, the same ones on every peer. (.05: guess; 270 kB of the shipped Shakespeare.)"""


class BuiltinCorpus(_CorpusSection):
    """A text that ships with the package. To train on another, replace this whole table: docs/DATA.md."""

    kind: Literal["builtin"]
    """Where the text comes from: builtin, hub or file."""

    name: Literal["shakespeare"]
    """Which of the shipped texts."""


class _LargeCorpus(_CorpusSection):
    """What corpora of any size have."""

    text_field: Word = "text"
    """Column that holds the text. (text: the usual name on the hub.)"""

    max_tokens: int = Field(default=100_000_000, ge=1_000, le=2_000_000_000)
    """Tokens read; what comes after them is left out. Each peer keeps them on disk, 1 to 4 bytes each. (1e8: guess.)"""


class HubCorpus(_LargeCorpus):
    """A data set on the Hugging Face hub, streamed."""

    kind: Literal["hub"]
    """Where the text comes from: builtin, hub or file."""

    name: HubName
    """Repository on the hub, owner/name."""

    revision: Revision
    """Full commit hash, 40 hexadecimal digits; the repository's page lists it under "Files and versions"."""

    config: Word = "default"
    """Configuration (subset) of the data set. (default: what the hub calls an unnamed one.)"""

    split: Word = "train"
    """Split of the data set. (train: the usual name on the hub.)"""


class FileCorpus(_LargeCorpus):
    """A file that each owner already has."""

    kind: Literal["file"]
    """Where the text comes from: builtin, hub or file."""

    sha256: Digest
    """SHA-256 of the file; each owner names the file itself on the command line."""

    format: Literal["text", "jsonl", "parquet"] = "text"
    """What the file holds: text, jsonl or parquet. (text: the plainest; it has no columns, text_field is not read.)"""


def _expanded(short: Callable[[str], dict[str, str] | None]) -> BeforeValidator:
    """Replace a short string by the table it stands for; anything else goes on to the schema as it is."""

    def expand(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        table = short(value) or _hub_or_file(value)
        if table is None:
            raise ValueError("no such source; write a table, or hf:owner/name@<revision>, or sha256:<digest>")
        return table

    return BeforeValidator(expand)


def _hub_or_file(value: str) -> dict[str, str] | None:
    scheme, _, rest = value.partition(":")
    if scheme == "hf":
        name, _, revision = rest.partition("@")
        return {"kind": "hub", "name": name, "revision": revision}
    if scheme == "sha256":
        return {"kind": "file", "sha256": rest}
    return None


def _short_tokenizer(value: str) -> dict[str, str] | None:
    return {"kind": "bytes"} if value == "bytes" else None


def _short_corpus(value: str) -> dict[str, str] | None:
    scheme, _, name = value.partition(":")
    return {"kind": "builtin", "name": name} if scheme == "builtin" else None


Tokenizer = Annotated[
    Annotated[BytesTokenizer | HubTokenizer | FileTokenizer, Field(discriminator="kind")],
    _expanded(_short_tokenizer),
]
"""Any tokenizer; ``kind`` chooses which fields it takes."""

Corpus = Annotated[
    Annotated[BuiltinCorpus | HubCorpus | FileCorpus, Field(discriminator="kind")],
    _expanded(_short_corpus),
]
"""Any corpus; ``kind`` chooses which fields it takes."""
