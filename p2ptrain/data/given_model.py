"""A published model that an author's new run continues, as it was found."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.data.published_settings import PublishedSettings
from p2ptrain.data.tokenizer import JsonTokenizer, Tokenizer

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
    tokenizer: Path | None
    """The tokenizer.json; None if the model has none."""
    template: str | CorpusError | None = None
    """The chat template, or why it cannot be read; None if the model has none."""
    weights: tuple[tuple[NamedFile, Path], ...] = ()
    """Files that the section names by digest."""
    settings: PublishedSettings = field(default_factory=PublishedSettings)
    """What its other files say."""
    kept: bytes | None = None
    """The settings as a file, which the section names by digest; None if exports need none."""

    def separator(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Return the manifest's ``tokenizer.separator`` as a table, empty if documents end as usual."""
        ends = self.settings.ends_for(tokenizer) if isinstance(tokenizer, JsonTokenizer) else []
        return {"separator": ends[0]} if ends and ends[0] != tokenizer.separator else {}

    def without_settings(self) -> GivenModel:
        """Return the model for a run with another tokenizer, of which the settings do not speak."""
        init = self.section.init
        bare = None if init is None else init.model_copy(update={"settings": None})
        section = self.section.model_copy(update={"init": bare})
        return replace(self, section=section, settings=PublishedSettings(), kept=None)
