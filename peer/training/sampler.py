"""Texts that a run's weights write, for its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2ptrain.data.tokenizer import Tokenizer, tokenizer_of
from p2ptrain.manifest import Manifest
from p2ptrain.tokens.corpus import ShardAwayError, ShardCorpus
from p2ptrain.tokens.opened import end_of_turn
from p2ptrain.train.generate import sample_text
from peer.home import Home
from peer.model import stored_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TextSampler:
    """Writes samples. The tokenizer, which training does without, is loaded for the first one.

    Args:
        home: what may have the tokenizer; not before others have sent it.
        text: the run's.
    """

    def __init__(self, home: Home, manifest: Manifest, text: ShardCorpus) -> None:
        self._home, self._manifest, self._text = home, manifest, text
        self._tokenizer: Tokenizer | None = None

    def sample(self, module: PreTrainedModel, new_tokens: int) -> str:
        """Return a text of up to so many new tokens; empty while tokenizer or dialogues are not on this machine."""
        spec = self._manifest.tokenizer
        if self._tokenizer is None:
            file = stored_tokenizer(self._home, spec)
            if spec.kind != "bytes" and file is None:
                return ""
            self._tokenizer = tokenizer_of(self._manifest, file)
        try:
            dialogue = self._text.prompt_ids()
        except ShardAwayError:
            return ""
        return sample_text(module, self._tokenizer, dialogue, end_of_turn(self._manifest), new_tokens)
