"""The ``model.init`` section: published weights from which a run begins, instead of random ones. Never a path.

Weights are safetensors files: of a repository on the Hugging Face hub at a commit, or named by their digests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from p2ptrain.manifest.section import Digest, HubName, Revision, Section

MAX_WEIGHT_FILES = 64
"""Most files of one model; transformers writes shards of 5 GB or more."""


class _Published(Section):
    """Fields of all published weights."""

    kind: str
    """Source of the initial weights: hub or file."""

    settings: Digest | None = None
    """SHA-256 of what exports keep of the model: chat template, special tokens, how to generate. (Absent: nothing.)"""

    @model_serializer(mode="wrap")
    def _absent_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out absent settings, so that the RunId of a run without them does not depend on this field."""
        data: dict[str, Any] = serialize(self)
        if data.get("settings") is None:
            data.pop("settings", None)
        return data


class HubWeights(_Published):
    """Weights of a model on the Hugging Face hub."""

    kind: Literal["hub"]
    """Source of the initial weights: hub or file."""

    name: HubName
    """Repository on the hub, owner/name."""

    revision: Revision
    """Full commit hash, 40 hexadecimal digits; the repository's page lists it under "Files and versions"."""


def _distinct(digests: list[str]) -> list[str]:
    if len(set(digests)) < len(digests):
        raise ValueError("a file is named twice")
    return digests


class FileWeights(_Published):
    """Local safetensors files; up to 64 MiB in all, peers get them by the link, else each needs --weights PATH."""

    kind: Literal["file"]
    """Source of the initial weights: hub or file."""

    sha256: Annotated[list[Digest], Field(min_length=1, max_length=MAX_WEIGHT_FILES), AfterValidator(_distinct)]
    """SHA-256 of each safetensors file, 1 to 64, in the order of the shards."""


InitialWeights = Annotated[HubWeights | FileWeights, Field(discriminator="kind")]
"""Any source of initial weights; ``kind`` determines its fields."""
