"""Chat template of a trained model: that of its run, or the one in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.chat_template import MOST_TEMPLATE_BYTES, ChatTemplate, read_template, special_tokens_in, template_in
from p2ptrain.data.packed_stream import load_template, template_name
from peer.exported_chat import TEMPLATE_FILE
from peer.home import Home

if TYPE_CHECKING:
    from p2ptrain.manifest import SignedManifest
    from peer.trained.language_model import LanguageModel

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def find_template(model: LanguageModel, file: Path | None) -> ChatTemplate | None:
    """Return the chat template of a run or a folder, to be closed; None if it has none.

    Args:
        file: the run's template, if it names one by digest that the home does not keep; for a folder, instead of its
            own.

    Raises CorpusError if it is unusable.
    """
    if model.signed is not None:
        return _of_run(model, model.signed, Home(model.place), file)
    variables, source = _described(model.place)
    path = file or model.place / TEMPLATE_FILE
    if path.is_file() or file is not None:
        return ChatTemplate.checked(read_template(path), str(path), variables)
    return None if source is None else ChatTemplate.checked(source, str(model.place), variables)


def _of_run(model: LanguageModel, signed: SignedManifest, home: Home, file: Path | None) -> ChatTemplate | None:
    corpus = signed.manifest.corpus
    if not (name := template_name(corpus)):
        if file is not None:
            raise CorpusError(f"--template names {file}, but this run has no chat template.", "Omit --template.")
        return None
    return load_template(corpus, model.tokenizer, file or home.files.find(name))


def _described(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the special tokens and the chat template, if any, in a folder's tokenizer_config.json."""
    try:
        with (folder / TOKENIZER_CONFIG_FILE).open("rb") as file:
            config: Any = json.loads(file.read(64 * MOST_TEMPLATE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}, None
    return special_tokens_in(config), template_in(config)
