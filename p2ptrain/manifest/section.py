"""The common ground of all manifest sections: how strict they are, and the kinds of string a stranger may send."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Frozen, strict (1 is no bool, "1" no number), closed to unknown fields, finite; docstrings become comments."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


# None of these can hold a control character, a space at an end, or a path that leads anywhere.
_WORD = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"

Title = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9 ._-]{0,62}[A-Za-z0-9])?$")]
"""A name for people: 1 to 64 letters, digits, blanks, dots, dashes."""

Word = Annotated[str, Field(pattern=rf"^{_WORD}$", max_length=96)]
"""A name for machines: a column, a split."""

HubName = Annotated[str, Field(pattern=rf"^{_WORD}/{_WORD}$", max_length=192)]
"""A repository on the Hugging Face hub, ``owner/name``."""

Revision = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
"""A full git commit hash: the only kind of revision that cannot move."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""32 bytes as 64 lower-case hexadecimal digits: a SHA-256, an Ed25519 public key."""

__all__ = ["Digest", "HubName", "Revision", "Section", "Title", "Word"]
