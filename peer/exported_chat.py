"""Chat template of an export, and a prompt by which is checked that transformers applies it as training did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.data.chat_tokens import ChatEncoder
from peer.model import run_template

if TYPE_CHECKING:
    from p2ptrain.data.tokenizer import Tokenizer
    from p2ptrain.manifest import SignedManifest
    from peer.home import Home

TEMPLATE_FILE = "chat_template.jinja"
"""Name under which transformers reads a template."""

MESSAGES = [{"role": "user", "content": "Is 2 < 3?\n\n  Où est l'été? 🙂"}]


@dataclass(frozen=True, slots=True)
class ExportedChat:
    """What an export tells of dialogues."""

    template: str
    end_id: int | None
    """Id that ends an answer; None if none does."""
    prompt_ids: list[int]
    """Tokens of ``MESSAGES`` and the beginning of an answer."""

    def write(self, folder: Path) -> None:
        """Write the template. Raises OSError."""
        (folder / TEMPLATE_FILE).write_text(self.template, encoding="utf-8")


def exported_chat(home: Home, signed: SignedManifest, tokenizer: Tokenizer) -> ExportedChat | None:
    """Return the chat of a home's run; None if the run was not taught dialogues. Raises CorpusError."""
    template = run_template(home, signed, tokenizer)
    if template is None:
        return None
    with template:
        encoder = ChatEncoder(template, tokenizer)
        return ExportedChat(template.source, encoder.end_of_turn_id(), encoder.prompt_ids(MESSAGES).tolist())
