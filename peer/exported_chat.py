"""Chat template of an export, and a prompt by which is checked that transformers applies it as training did.

A run that was not taught dialogues keeps the template of the published model that it continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.data.chat_template import with_values
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.published_settings import TEMPLATE
from peer.model import run_template

if TYPE_CHECKING:
    from p2ptrain.data.published_settings import PublishedSettings
    from p2ptrain.data.tokenizer import Tokenizer
    from p2ptrain.manifest import SignedManifest
    from peer.home import Home

MESSAGES = [{"role": "user", "content": "Is 2 < 3?\n\n  Où est l'été? 🙂"}]


@dataclass(frozen=True, slots=True)
class ExportedChat:
    """What an export tells of dialogues."""

    template: str
    end_id: int | None
    """Id that ends an answer; None if none does."""
    prompt_ids: list[int]
    """Tokens of ``MESSAGES`` and the beginning of an answer; empty if the run was not taught dialogues."""

    def write(self, folder: Path) -> None:
        """Write the template where transformers reads it. Raises OSError."""
        (folder / TEMPLATE).write_text(self.template, encoding="utf-8")


def exported_chat(
    home: Home, signed: SignedManifest, tokenizer: Tokenizer, settings: PublishedSettings
) -> ExportedChat | None:
    """Return the chat of a home's run; None if neither it nor its published model has one. Raises CorpusError."""
    template = run_template(home, signed, tokenizer)
    if template is None:
        return None if settings.template is None else ExportedChat(settings.template, None, [])
    encoder = ChatEncoder(template, tokenizer)
    end_id, prompt_ids = encoder.end_of_turn_id(), encoder.prompt_ids(MESSAGES).tolist()
    source = template.source
    if end_id not in (None, tokenizer.separator):  # readers of the export get another eos_token than the template had
        source = with_values(source, {"eos_token": tokenizer.separator_text})
    # The day of training cannot be compared with today.
    return ExportedChat(source, end_id, [] if "strftime_now" in source else prompt_ids)
