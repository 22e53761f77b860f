"""Chat template of a published model, as it is kept for a run that continues the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, HomeError, WeightsError
from p2ptrain.data.chat_template import MOST_TEMPLATE_BYTES, special_tokens_in, template_in, with_values
from p2ptrain.data.stream import cache_directory

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""Files in which transformers keeps a chat template: the second one in older folders."""

MOST_CONFIG_BYTES = 16 << 20
"""Maximum size of a tokenizer_config.json; those that list every special token of Gemma have a megabyte."""

_REMEDY = "Name one: --template FILE, or --template chatml."

Read = Callable[[str, int], bytes | None]
"""Returns the content of a file of the model, of at most so many bytes; None if there is none of that name."""


def kept_template(read: Read) -> Path | CorpusError | None:
    """Return a copy of a model's template in the cache; None if the model has none.

    The copy contains the special tokens that the template writes: they are those of tokenizer_config.json, which no
    peer has. If there is a template that cannot be read, the error is returned, not raised: only a run of dialogues
    needs the template.

    Raises HomeError if the cache cannot be written.
    """
    try:
        text, config = read(TEMPLATE, MOST_TEMPLATE_BYTES), _decoded(read(TOKENIZER_CONFIG, MOST_CONFIG_BYTES))
    except WeightsError as error:
        return CorpusError(f"The model's chat template is not known. {error.problem}", _REMEDY)
    if text is None:
        source = template_in(config)
        if source is None and isinstance(config, dict) and config.get("chat_template"):
            return CorpusError(
                f"The chat template in the model's {TOKENIZER_CONFIG} is too long, or none is named default.",
                _REMEDY,
            )
    else:
        source = text.decode("utf-8-sig", errors="replace")
    if not source:
        return None
    return kept(source, special_tokens_in(config))


def special_tokens(read: Read) -> dict[str, str]:
    """Return the texts of a model's special tokens, by the names that templates use; empty if they are not known."""
    try:
        return special_tokens_in(_decoded(read(TOKENIZER_CONFIG, MOST_CONFIG_BYTES)))
    except WeightsError:
        return {}


def kept(source: str, values: Mapping[str, str]) -> Path:
    """Return a copy in the cache of a template, with the values of what it names. Raises HomeError."""
    content = with_values(source, values).encode(errors="replace")
    path = cache_directory() / "templates" / f"{hashlib.sha256(content).hexdigest()}.jinja"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, content)
    except OSError as error:
        raise HomeError(f"{path} cannot be written: {files.cause(error)}.", files.remedy(error, "")) from error
    return path


def _decoded(config: bytes | None) -> Any:
    try:
        return json.loads(config or b"{}")
    except (ValueError, RecursionError):
        return None
