"""Special tokens of an export: one end of text wherever programs look, and what training did not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2ptrain.data.tokenizer import JsonTokenizer

if TYPE_CHECKING:
    from p2ptrain.data.published_settings import PublishedSettings
    from p2ptrain.data.tokenizer import Tokenizer
    from peer.exported_chat import ExportedChat


@dataclass(frozen=True, slots=True)
class ExportedTokens:
    """Special tokens, and the settings with which the model generates."""

    ends: Sequence[int]
    """Ids at which a text ends: that of training, then others of the published model."""
    begin: int | None
    pad: int | None
    texts: Mapping[str, str]
    """Names of tokenizer_config.json, and their texts."""
    settings: Mapping[str, bool | int | float]
    """Numbers of generation_config.json."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat: ExportedChat | None, settings: PublishedSettings) -> ExportedTokens:
        """Return the tokens of a run with its tokenizer, its chat template and the model that it continues."""
        trained = tokenizer.separator if chat is None or chat.end_id is None else chat.end_id
        begin = tokenizer.prefix[0] if tokenizer.prefix else None
        if not isinstance(tokenizer, JsonTokenizer):
            return cls([] if trained is None else [trained], begin, None, {}, {})
        ends = list(dict.fromkeys([*([] if trained is None else [trained]), *settings.ends_for(tokenizer)]))
        texts = {**settings.tokens, "bos_token": tokenizer.bos_text or settings.tokens.get("bos_token", "")}
        texts["eos_token"] = tokenizer.token(ends[0]) if ends else ""
        if begin is None:  # no text begins with it, but readers take it from an empty prompt
            begin = tokenizer.token_id(settings.tokens.get("bos_token", ""))
        stated = settings.pad if settings.pad is not None and tokenizer.token(settings.pad) else None
        pad = tokenizer.token_id(texts.get("pad_token", "")) if stated is None else stated
        return cls(ends, begin, pad, texts, settings.generation)

    @property
    def end(self) -> int | None:
        """Id at which a text ends for readers that know only one."""
        return self.ends[0] if self.ends else None

    def generation(self) -> dict[str, Any]:
        """Return what generation_config.json has beside single tokens."""
        from transformers import GenerationConfig

        own: dict[str, Any] = {"eos_token_id": list(self.ends)} if len(self.ends) > 1 else {}
        try:
            GenerationConfig(**self.settings)
            own |= self.settings
        except Exception:  # a stranger's numbers, which would keep the export from being loaded
            pass
        # generate may otherwise take the end in config.json, which has one
        return {**own, "_from_model_config": False} if own else {}
