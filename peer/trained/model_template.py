"""Chat template of a trained model: that of its run or of the model that the run continues, or its folder's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.chat_template import ChatTemplate, read_template
from p2ptrain.data.packed_stream import load_template, template_name
from p2ptrain.data.published_settings import TEMPLATE as TEMPLATE_FILE
from p2ptrain.data.published_settings import PublishedSettings
from peer.home import Home
from peer.model import run_settings

if TYPE_CHECKING:
    from p2ptrain.manifest import SignedManifest
    from peer.trained.language_model import LanguageModel


def find_template(model: LanguageModel, file: Path | None) -> ChatTemplate | None:
    """Return the chat template of a run or a folder; None if it has none.

    Args:
        file: the run's template, if it names one by digest that the home does not keep; for a folder, instead of its
            own.

    Raises CorpusError if it is unusable.
    """
    if model.signed is not None:
        return _of_run(model, model.signed, Home(model.place), file)
    settings = PublishedSettings.read(model.place)
    path = file or model.place / TEMPLATE_FILE
    if path.is_file() or file is not None:
        return ChatTemplate.checked(read_template(path), str(path), settings.tokens)
    return _checked(settings, f"{model.place}")


def _checked(settings: PublishedSettings, where: str) -> ChatTemplate | None:
    return None if settings.template is None else ChatTemplate.checked(settings.template, where, settings.tokens)


def _of_run(model: LanguageModel, signed: SignedManifest, home: Home, file: Path | None) -> ChatTemplate | None:
    corpus = signed.manifest.corpus
    if not (name := template_name(corpus)):
        if file is not None:
            raise CorpusError(f"--template names {file}, but this run has no chat template.", "Omit --template.")
        return _checked(run_settings(home, signed), "of the model that the run continues")
    return load_template(corpus, model.tokenizer, file or home.files.find(name))
