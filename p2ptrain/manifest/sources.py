"""The tokenizer and corpus sections: how text became tokens, and which tokens. Never a path, nor a place to read from.

The author's ``init`` writes them; peers get what they name by its digest from each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from p2ptrain.manifest.section import Digest, Section

BYTE_VOCABULARY = 256
"""Token ids of the byte tokenizer, one per byte value, no special tokens."""


class BytesTokenizer(Section):
    """UTF-8 bytes as tokens: 256 ids, no file. To use another tokenizer, `init --tokenizer`: docs/DATA.md."""

    kind: Literal["bytes"]
    """Source of the tokenizer: bytes or file."""


class FileTokenizer(Section):
    """A tokenizer.json, which travels with the run: `init --tokenizer` writes this table."""

    kind: Literal["file"]
    """Source of the tokenizer: bytes or file."""

    sha256: Digest
    """SHA-256 of the tokenizer.json."""

    separator: int | None = Field(default=None, ge=0, lt=1 << 20)
    """Token id that ends documents, as a published model names it. (Absent: the usual one of the vocabulary.)"""

    @model_serializer(mode="wrap")
    def _absent_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an absent separator, so that the RunId of a run without one does not depend on this field."""
        data: dict[str, Any] = serialize(self)
        if data.get("separator") is None:
            data.pop("separator", None)
        return data


TemplateName = Annotated[str, Field(pattern=r"^(chatml|[0-9a-f]{64})?$")]
"""The built-in chat template, the SHA-256 of a file, or empty."""


Mirror = Annotated[str, Field(pattern=r"^(https://[!-~]{1,300}|hf:[!-~]{3,250}|/[!-~]{0,300})?$")]
"""An https address, a data set of the hub, or a folder."""


class BuiltinCorpus(Section):
    """Text that ships with the package, read as bytes. To train on another text, `init --corpus`: docs/DATA.md."""

    kind: Literal["builtin"]
    """Source of the text: builtin or shards."""

    name: Literal["shakespeare"]
    """Name of the shipped text."""

    # Guess: measure the variance of the held-out loss.
    validation_fraction: float = Field(default=0.05, gt=0, le=0.5)
    """Fraction of the tokens held out, equal on every peer; .05 is 270 kB of the shipped Shakespeare."""


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


Tokenizer = Annotated[BytesTokenizer | FileTokenizer, Field(discriminator="kind")]
"""Any tokenizer; ``kind`` determines its fields."""

Corpus = Annotated[BuiltinCorpus | ShardsCorpus, Field(discriminator="kind")]
"""Any corpus; ``kind`` determines its fields."""
