"""A published model that an author's new run continues, as it was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2ptrain.base.errors import CorpusError
    from p2ptrain.data.file_store import NamedFile
    from p2ptrain.manifest import Decoder


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A model whose weights were checked against its sizes."""

    name: str
    """Path or repository, for people."""
    section: Decoder
    """The manifest's section, with the source of the initial weights."""
    tokenizer: Path | dict[str, Any] | None
    """The tokenizer.json, or a table of the manifest; None if the model has none."""
    template: Path | CorpusError | None = None
    """A copy of its chat template in the cache, or why there is none; None if the model has none."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of its special tokens, by the names that chat templates use."""
    weights: tuple[tuple[NamedFile, Path], ...] = ()
    """Files that the section names by digest."""
