"""The tokenizer and corpus sections: the source of the text and its conversion to tokens. Never a path.

A manifest is untrusted, so it names a file only by its digest. Peers get it from each other, or by an option.
Sources on the Hugging Face hub are pinned to a commit. A short string may replace either table::

    tokenizer = "bytes"                      corpus = "builtin:shakespeare"
    tokenizer = "hf:owner/name@<revision>"   corpus = "hf:owner/name@<revision>"
    tokenizer = "sha256:<digest>"            corpus = "sha256:<digest>"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from p2ptrain.manifest.section import Digest, HubName, Revision, Section, Word

MAX_TOKENS = 2_000_000_000
"""Maximum of ``max_tokens``: up to 8 GB on each peer's disk. Guess: survey the volunteers' free disk space."""

BYTE_VOCABULARY = 256
"""Token ids of the byte tokenizer, one per byte value, no special tokens."""


class BytesTokenizer(Section):
    """UTF-8 bytes as tokens: 256 ids, no download. To use another tokenizer, replace this table: docs/DATA.md."""

    kind: Literal["bytes"]
    """Source of the tokenizer: bytes, hub or file."""


class _NamedTokenizer(Section):
    """Fields of tokenizers in a tokenizer.json."""

    kind: str
    """Source of the tokenizer: bytes, hub or file."""

    separator: int | None = Field(default=None, ge=0, lt=1 << 20)
    """Token id that ends documents, as a published model names it. (Absent: the usual one of the vocabulary.)"""

    @model_serializer(mode="wrap")
    def _absent_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an absent separator, so that the RunId of a run without one does not depend on this field."""
        data: dict[str, Any] = serialize(self)
        if data.get("separator") is None:
            data.pop("separator", None)
        return data


class HubTokenizer(_NamedTokenizer):
    """Tokenizer from the Hugging Face hub."""

    kind: Literal["hub"]
    """Source of the tokenizer: bytes, hub or file."""

    name: HubName
    """Repository on the hub, owner/name."""

    revision: Revision
    """Full commit hash, 40 hexadecimal digits; the repository's page lists it under "Files and versions"."""


class FileTokenizer(_NamedTokenizer):
    """Local tokenizer.json; peers get it by the link if `init` or the bootstrap got it with --tokenizer FILE."""

    kind: Literal["file"]
    """Source of the tokenizer: bytes, hub or file."""

    sha256: Digest
    """SHA-256 of the tokenizer.json."""


TemplateName = Annotated[str, Field(pattern=r"^(chatml|[0-9a-f]{64})?$")]
"""The built-in chat template, the SHA-256 of a file, or empty."""


Mirror = Annotated[str, Field(pattern=r"^(https://[!-~]{1,300}|hf:[!-~]{3,250}|/[!-~]{0,300})?$")]
"""An https address, a data set of the hub, or a folder."""


class _CorpusSection(Section):
    """Fields of all corpora."""

    kind: str
    """Source of the text: builtin, hub or file."""

    # Guess: measure the variance of the held-out loss.
    validation_fraction: float = Field(default=0.05, gt=0, le=0.5)
    """Fraction of the tokens held out, equal on every peer; .05 is 270 kB of the shipped Shakespeare."""


class BuiltinCorpus(_CorpusSection):
    """Text that ships with the package. To train on another text, replace this table: docs/DATA.md."""

    kind: Literal["builtin"]
    """Source of the text: builtin, hub or file."""

    name: Literal["shakespeare"]
    """Name of the shipped text."""


class _LargeCorpus(_CorpusSection):
    """Fields of corpora of any size."""

    text_field: Word = "text"
    """Column that holds the text. (text: the usual name on the hub.)"""

    # Guess: survey the volunteers' free disk space.
    max_tokens: int = Field(default=100_000_000, ge=1_000, le=MAX_TOKENS)
    """Most tokens read; the rest is left out. Each peer keeps them on disk, 1 to 4 bytes per token."""

    template: TemplateName = ""
    """Chat template of a corpus of dialogues: chatml or the SHA-256 of a Jinja file. (Empty: the rows are text.)"""

    @model_serializer(mode="wrap")
    def _text_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an empty template, so that the RunId of a run without dialogues does not depend on this field."""
        data: dict[str, Any] = serialize(self)
        if data.get("template") == "":
            del data["template"]
        return data


class HubCorpus(_LargeCorpus):
    """Data set on the Hugging Face hub, streamed."""

    kind: Literal["hub"]
    """Source of the text: builtin, hub or file."""

    name: HubName
    """Repository on the hub, owner/name."""

    revision: Revision
    """Full commit hash, 40 hexadecimal digits; the repository's page lists it under "Files and versions"."""

    config: Word = "default"
    """Configuration (subset) of the data set. (default: the hub's name of an unnamed one.)"""

    split: Word = "train"
    """Split of the data set. (train: the usual name on the hub.)"""


class FileCorpus(_LargeCorpus):
    """Local file; up to 64 MiB, peers get it by the link if `init --corpus` or `bootstrap --data` got it."""

    kind: Literal["file"]
    """Source of the text: builtin, hub or file."""

    sha256: Digest
    """SHA-256 of the file."""

    format: Literal["text", "jsonl", "parquet"] = "text"
    """Format of the file: text, jsonl or parquet. (text: the simplest; it has no columns and ignores text_field.)"""


class ShardsCorpus(Section):
    """Text that its author tokenized: `init --corpus` writes this table and the shards."""

    kind: Literal["shards"]
    """Source of the text: builtin or shards."""

    root: Digest
    """SHA-256 of the index, which has those of all shards."""

    training_tokens: int = Field(gt=0)
    """Training tokens in the shards."""

    held_out_tokens: int = Field(gt=0)
    """Held-out tokens in shards of their own."""

    mirror: Mirror = ""
    """Where the shards are besides peers: https://…, hf:owner/name[@revision], or a folder. (Empty: nowhere.)"""

    template: TemplateName = ""
    """Chat template of dialogues: chatml or the SHA-256 of a Jinja file. (Empty: text.)"""

    end_of_turn: Annotated[str, Field(max_length=64)] = ""
    """Text that ends an answer in dialogues. (Empty: text, or it cannot be told.)"""

    @model_serializer(mode="wrap")
    def _empty_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is empty."""
        data: dict[str, Any] = serialize(self)
        return {name: value for name, value in data.items() if value != ""}


def _expanded(short: Callable[[str], dict[str, str] | None]) -> BeforeValidator:
    """Return a validator that replaces a short string with its table, and leaves other values to the schema."""

    def expand(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        table = short(value) or _hub_or_file(value)
        if table is None:
            raise ValueError("unknown source; write a table, or hf:owner/name@<revision>, or sha256:<digest>")
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
"""Any tokenizer; ``kind`` determines its fields."""

Corpus = Annotated[
    Annotated[BuiltinCorpus | HubCorpus | FileCorpus | ShardsCorpus, Field(discriminator="kind")],
    _expanded(_short_corpus),
]
"""Any corpus; ``kind`` determines its fields."""
