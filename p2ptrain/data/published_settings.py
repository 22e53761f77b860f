"""What a published model's folder says beside its sizes and weights: chat template, special tokens, how to generate.

``init`` keeps it in a small JSON file for a run that continues the model; the manifest names the file by digest, and
peers get it by the link. Training reads none of it but the token that ends documents, which the manifest repeats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, WeightsError
from p2ptrain.data.chat_template import (
    MOST_TEMPLATE_BYTES,
    special_tokens_in,
    template_in,
    with_values,
)
from p2ptrain.data.tokenizer import JsonTokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""Files in which transformers keeps a chat template: the second one in older folders."""
SPECIAL_MAP = "special_tokens_map.json"
"""File of older folders with the special tokens that ``TOKENIZER_CONFIG`` leaves out."""
SETTINGS_FILES = (GENERATION, TEMPLATE, TOKENIZER_CONFIG, SPECIAL_MAP)

MOST_CONFIG_BYTES = 16 << 20
"""Maximum size of a tokenizer_config.json; those that list every special token of Gemma have a megabyte."""
MOST_SETTINGS_BYTES = 2 * MOST_TEMPLATE_BYTES
"""Maximum size of the file of a run's settings, most of which is the template."""
MOST_ENDS = 16
"""Most ids that end a text: files in wide use have up to three."""

_UNKEPT = ("_", "output_", "return_", "use_cache")
"""Beginnings of fields that do not say how the model generates."""

_REMEDY = "Name one: --template FILE, or --template chatml."


@dataclass(frozen=True, slots=True)
class PublishedSettings:
    """Settings of a published model; from a stranger, of checked types."""

    template: str | None = None
    """Chat template."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of the special tokens, by the names that templates use."""
    ends: Sequence[int] = ()
    """Ids at which the model ends a text."""
    pad: int | None = None
    """Id that fills rows up."""
    generation: Mapping[str, bool | int | float] = field(default_factory=dict)
    """How to generate: numbers of generation_config.json, without token ids."""

    @classmethod
    def read(cls, folder: Path) -> PublishedSettings:
        """Read a model's files: what generation_config.json names goes before config.json, as in transformers.

        Raises WeightsError if a file is too large or cannot be read.
        """
        config, generation = _table(_read(folder / CONFIG)), _table(_read(folder / GENERATION))
        described = _table(_read(folder / TOKENIZER_CONFIG))
        try:
            text = _read(folder / TEMPLATE, MOST_TEMPLATE_BYTES)
            source = template_in(described) if text is None else text.decode("utf-8-sig", errors="replace")
        except WeightsError:  # only dialogues need it: kept_template reports it
            source = None
        return cls._checked(
            template=source or None,
            tokens={**special_tokens_in(_table(_read(folder / SPECIAL_MAP))), **special_tokens_in(described)},
            ends=_ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id")),
            pad=next(iter([*_ids(generation.get("pad_token_id")), *_ids(config.get("pad_token_id"))]), None),
            generation=generation,
        )

    @classmethod
    def parse(cls, data: bytes) -> PublishedSettings:
        """Return the settings in a run's file, which is a stranger's; what has another type is left out."""
        found = _table(data[:MOST_SETTINGS_BYTES])
        tokens = found.get("tokens")
        return cls._checked(
            template=template_in({"chat_template": found.get("template")}) or None,
            tokens=special_tokens_in(tokens),
            ends=_ids(found.get("ends")),
            pad=next(iter(_ids(found.get("pad"))), None),
            generation=_table(found.get("generation")),
        )

    @classmethod
    def _checked(cls, generation: Mapping[str, Any], **others: Any) -> PublishedSettings:
        kept = {
            name: value
            for name, value in generation.items()
            if name.isidentifier() and not name.endswith("_token_id") and not name.startswith(_UNKEPT)
            if isinstance(value, bool | int | float) and math.isfinite(value)
        }
        return cls(generation=kept, **others)

    def to_bytes(self) -> bytes:
        """Return the content of a run's file."""
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()

    def ends_for(self, tokenizer: JsonTokenizer) -> list[int]:
        """Return the ids at which a text ends, that of documents first; without any that stands for text.

        Those of the model's configuration, as ``generate`` of transformers takes them: of several the tokenizer's own
        end first. Without any, the tokenizer's own.
        """
        named = tokenizer.token_id(self.tokens.get("eos_token", ""))
        stated = [each for each in self.ends if each == named or tokenizer.is_mark(each)]
        own = [] if named is None or (stated and named not in stated) else [named]
        return list(dict.fromkeys([*own, *stated]))


def _read(path: Path, most_bytes: int = MOST_CONFIG_BYTES) -> bytes | None:
    """Return a file's content; None if there is none. Raises WeightsError if it is unreadable or too large."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {files.cause(error)}.", files.remedy(error, "")) from error
    if len(content) > most_bytes:
        raise WeightsError(f"{path} is larger than {most_bytes:,} bytes.", "Use the model's own file.")
    return content


def kept_settings(settings: PublishedSettings) -> bytes | None:
    """Return the content of a run's file; None if an export would write the same without it."""
    tokens = settings.tokens.keys() & {"bos_token", "pad_token", "unk_token"}
    content = settings.to_bytes()
    if not (settings.template or tokens or len(settings.ends) > 1 or settings.pad is not None or settings.generation):
        return None
    return None if len(content) > MOST_SETTINGS_BYTES else content


def kept_template(settings: PublishedSettings, folder: Path) -> str | CorpusError | None:
    """Return a model's template for a run; None if the model has none.

    It contains the special tokens that the template writes: they are those of tokenizer_config.json, which no peer has.
    If there is a template that cannot be read, the error is returned, not raised: only a run of dialogues needs it.
    """
    if settings.template is not None:
        return with_values(settings.template, settings.tokens)
    try:
        _read(folder / TEMPLATE, MOST_TEMPLATE_BYTES)
    except WeightsError as error:
        return CorpusError(f"The model's chat template is not known. {error.problem}", _REMEDY)
    if _table(_read(folder / TOKENIZER_CONFIG)).get("chat_template"):
        return CorpusError(
            f"The chat template in the model's {TOKENIZER_CONFIG} is too long, or none is named default.",
            _REMEDY,
        )
    return None


def _table(content: object) -> Mapping[str, Any]:
    """Return a table, or the one that JSON contains; an empty one for anything else."""
    try:
        found = json.loads(content) if isinstance(content, bytes) else content
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, Mapping) else {}


def _ids(found: object) -> list[int]:
    """Return the ids in a field that holds one or several."""
    each = found if isinstance(found, list) else [found]
    return [number for number in each[:MOST_ENDS] if type(number) is int and number >= 0]
