"""Base class and string types of all manifest sections."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Frozen section: strict types (1 is not a bool), no unknown fields; docstrings become comments."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


# No pattern allows a control character, a space at an end, or a path.
_WORD = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"

TITLE = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9 ._-]{0,62}[A-Za-z0-9])?$")

Title = Annotated[str, Field(pattern=TITLE.pattern)]
"""Name for people: 1 to 64 letters, digits, blanks, dots, dashes, underscores."""

Word = Annotated[str, Field(pattern=rf"^{_WORD}$", max_length=96)]
"""Name for machines, such as a column or a split."""

HUB_NAME = rf"^{_WORD}/{_WORD}$"

HubName = Annotated[str, Field(pattern=HUB_NAME, max_length=192)]
"""Repository on the Hugging Face hub, ``owner/name``."""

Revision = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
"""Full git commit hash, the only kind of revision that cannot move."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""32 bytes as 64 lower-case hexadecimal digits: a SHA-256 or an Ed25519 public key."""
