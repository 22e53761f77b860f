"""A home's trained model with its tokenizer, ready to be read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.nn import Module

from p2ptrain.data.chat_template import ChatTemplate
from p2ptrain.data.tokenizer import JsonTokenizer, Tokenizer
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.accelerator import choose_device, explained
from peer.home import Home
from peer.model import newest, run_settings, run_template, run_tokenizer, stored_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """Model of a home's newest checkpoint, and its tokenizer."""

    home: Home
    signed: SignedManifest
    module: PreTrainedModel
    tokenizer: Tokenizer
    ends: Sequence[int] = ()
    """Ids at which a text ends, as the settings of the published model say that the run continues."""

    @property
    def window(self) -> int:
        """Longest sequence that the model reads, in tokens."""
        return self.signed.manifest.model.config.max_position_embeddings

    def template(self) -> ChatTemplate | None:
        """Return the chat template of the run or of the model that it continues; None if neither has one.

        Raises CorpusError if it is unusable.
        """
        template = run_template(self.home, self.signed, self.tokenizer)
        settings = run_settings(self.home, self.signed)
        if template is not None or settings.template is None:
            return template
        return ChatTemplate.checked(settings.template, "of the model that the run continues", settings.tokens)


def load(place: Path, device_name: str) -> LanguageModel:
    """Load the newest checkpoint of a home in fp32. Raises UserError."""
    device, home = choose_device(device_name, is_exact=True), Home(place)
    with explained(device):
        signed, stored = newest(home)
        tokenizer = run_tokenizer(home, signed)
        module = stored_model(home, signed, stored).module
        module.train(False)
        Module.to(module, device)  # in place
    ends = run_settings(home, signed).ends_for(tokenizer) if isinstance(tokenizer, JsonTokenizer) else []
    return LanguageModel(home, signed, module, tokenizer, ends)
