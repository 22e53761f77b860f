"""A new run for an author's own text and tokenizer: what ``p2ptrain init --corpus --tokenizer`` writes and stores."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, HomeError, UserError
from p2ptrain.base.options import HUB
from p2ptrain.base.text import UserPath, printable
from p2ptrain.data.author_text import Source, find_source
from p2ptrain.data.chat_template import CHATML, CHATML_SOURCE, ChatTemplate, read_template, with_values
from p2ptrain.data.checking import check_vocabulary
from p2ptrain.data.figures import SUMMARY_FILE, TextFigures, text_figures
from p2ptrain.data.file_store import FILES_FOLDER, MOST_STORED_BYTES, FileStore, NamedFile
from p2ptrain.data.given_model import GivenModel
from p2ptrain.data.hub_weights import commit_of, fetch
from p2ptrain.data.packed_stream import template_variables
from p2ptrain.data.shard_text import BuiltText, TextOrder, build_text, corpus_table, step_of
from p2ptrain.data.sources import InterruptedCorpusError, file_digest
from p2ptrain.data.tokenizer import MOST_TOKENIZER_BYTES, Tokenizer, load_tokenizer
from p2ptrain.data.tokenizing import Tell
from p2ptrain.data.unfinished import SHARDS_FOLDER, Unfinished, check_stopped
from p2ptrain.data.weight_files import adopt
from p2ptrain.manifest import PRESETS, Manifest, create_run, name_change, preset, with_changes
from p2ptrain.manifest.fitting import continued, nearest_preset
from p2ptrain.manifest.presets import PRESET_TEXTS
from p2ptrain.manifest.sources import BytesTokenizer, FileTokenizer
from p2ptrain.tokens.store import ShardStore

MARGIN = 1.25
"""Training tokens that are read, for each token of the run's budget: peers read in orders of their own, so that of a
text of just the budget many peers together read 63 %, and of this one 55 % more often once. Guess: the loss of runs by
this factor."""

HELD_OUT = 0.05
"""Share of the tokens that is held out, at most a shard."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an author asks of ``init``."""

    corpora: Sequence[str] = ()
    """Files, folders and data sets; empty: the preset's."""
    tokenizer: str | Path | None = None
    """A tokenizer.json, or ``hf:OWNER/NAME[@REVISION]``; None: the model's or the preset's."""
    preset: str | None = None
    """None: the size that fits the text."""
    column: str = ""
    """Column of the text or of the messages in jsonl and parquet; empty: by its usual name."""
    run_name: str | None = None
    """For people; None: the directory's name if the manifest allows it."""
    model: GivenModel | None = None
    """Published model that the run continues."""
    template: Path | None = None
    """A chat template, or ``chatml``; None: if the corpus has dialogues, the model's own, else ChatML."""
    sequence_length: int | None = None
    """T; None: the preset's, for dialogues as long as most need."""
    held_out: float = HELD_OUT
    is_all: bool = False
    """Whether all of the text is read, however long."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that was created for an author's files."""

    manifest: Manifest
    reason: str
    """Sentences on the size of the model; empty if no text was given."""
    figures: TextFigures | None
    """Figures of the text; None if none was given."""
    sources: Sequence[Source] = ()
    stored: list[str] = field(default_factory=list)
    """Files that travel with the run: tokenizer, template, weights."""
    too_large: list[str] = field(default_factory=list)
    """Files that are too large to travel."""


class _Tokens(NamedTuple):
    """Tokenizer of a new run."""

    changes: dict[str, Any]
    loaded: Tokenizer
    file: Path | None


def create(directory: Path, wanted: Wanted, tell: Tell) -> NewRun:
    """Tokenize the author's text, choose the run's size, and create the run with its files.

    Whatever stops it, the directory holds no run before all is there. After Ctrl+C, a full disk or a failure of the
    hub the same call goes on where it was; bad input leaves nothing.

    Raises:
        CorpusError: a file is missing, unusable or changed while it was read, or the text is too short.
        ManifestError: no such preset, or a field is out of its bounds.
        WeightsError: the hub does not tell a commit.
        HomeError: the directory cannot be written.
    """
    model = wanted.model
    changes: dict[str, Any] = name_change(directory, wanted.run_name)
    preset_name = wanted.preset
    if model is not None:
        preset_name = preset_name or nearest_preset(model.section)
        if None not in (wanted.tokenizer, model.tokenizer):
            model = model.without_settings()
        changes |= continued(model.section, preset_name)
    if wanted.sequence_length is not None:
        changes["training.sequence_length"] = wanted.sequence_length
        if model is None:
            changes["model.config.max_position_embeddings"] = wanted.sequence_length
    found = _tokenizer(wanted, model)
    changes |= found.changes
    name = preset_name or "demo"
    corpora = wanted.corpora
    if not corpora and model is None and wanted.preset in PRESET_TEXTS:
        corpora = [PRESET_TEXTS[wanted.preset].corpus]
    if not corpora and (model is not None or found.file is not None):
        raise CorpusError(
            "A run with a tokenizer of its own needs a text, which init tokenizes.", "Name it: --corpus FILE"
        )
    if not corpora:
        check_stopped(directory, None)
        if wanted.sequence_length is not None:
            changes |= step_of(name, wanted.sequence_length)
        return NewRun(create_run(directory, name, changes), "", None)
    changes["corpus"] = corpus_table(None, "")
    drafted = with_changes(preset(name), changes)  # a wrong name or length, before the text is read
    check_vocabulary(drafted, found.loaded)
    sources = [find_source(each, wanted.column, wanted.template is not None) for each in corpora]
    is_dialogues = _kind_of(sources)
    source = _template(wanted.template, model) if is_dialogues else None
    chosen = "" if not is_dialogues else CHATML if source is None else _digest(source)
    where = CHATML if source is None else printable(wanted.template or "of the model")
    template = ChatTemplate.checked(source or CHATML_SOURCE, where, template_variables(found.loaded))
    order = TextOrder(
        sources,
        found.loaded,
        chosen,
        template if is_dialogues else None,
        wanted.held_out,
        _most_tokens(wanted),
        preset_name,
        model is not None,
        wanted.sequence_length,
    )
    key = {**order.identity, "--tokenizer, --model or --sequence-length": {**changes, "run.name": ""}}
    unfinished = Unfinished(directory, key)
    try:
        built = build_text(order, changes, ShardStore(directory / SHARDS_FOLDER), unfinished, tell)
        made = _written(directory, order, built, found, source, model)
    except InterruptedCorpusError:
        raise
    except HomeError as error:
        cause = error.__cause__
        remedy = files.remedy(cause, "") if isinstance(cause, OSError) else error.remedy
        raise HomeError(error.problem, f"{remedy} Then the same command goes on where it was.") from error
    except UserError:
        unfinished.forget(is_all=True)
        raise
    else:
        unfinished.forget()
        return made
    finally:
        unfinished.close()


def _written(
    directory: Path, order: TextOrder, built: BuiltText, tokens: _Tokens, template: str | None, model: GivenModel | None
) -> NewRun:
    """Write the run around its shards: index and other files, at last key and manifest. Raises UserError."""
    store = FileStore(directory / FILES_FOLDER)
    weights = () if model is None else model.weights
    kept: list[str] = []

    def store_files() -> None:
        store.add(built.index.root, built.index.to_bytes())
        if tokens.file is not None:
            store.adopt(NamedFile("tokenizer", "", tokens.changes["tokenizer"]["sha256"]), tokens.file)
            kept.append("tokenizer")
        if template is not None:
            store.add(order.template_name, template.encode(errors="replace"))
            kept.append("template")
        if model is not None and model.kept is not None:
            store.add(hashlib.sha256(model.kept).hexdigest(), model.kept)
        if weights and adopt([file for file, _ in weights], {file.sha256: path for file, path in weights}, store):
            kept.append("weights")
        try:
            files.replace(directory / SUMMARY_FILE, built.summary.to_bytes())
        except OSError as error:
            raise HomeError(f"{directory} cannot be written: {files.cause(error)}.", files.remedy(error)) from error

    manifest = create_run(directory, built.fit.preset, built.fit.changes, built.fit.reason, store_files)
    too_large = ["weights"] if weights and "weights" not in kept else []
    figures = text_figures(manifest, built.summary)
    return NewRun(manifest, built.fit.reason, figures, order.sources, kept, too_large)


def _tokenizer(wanted: Wanted, model: GivenModel | None) -> _Tokens:
    """Return the run's tokenizer and what the manifest says of it. Raises CorpusError and WeightsError."""
    named = wanted.tokenizer
    if named is None and model is not None:
        named = model.tokenizer
        if named is None:
            raise CorpusError(
                f"The model {model.name} has no tokenizer.json beside it.",
                "Name the model's own with --tokenizer FILE.",
            )
    if named is None and wanted.preset in PRESET_TEXTS:
        named = PRESET_TEXTS[wanted.preset].tokenizer
    if named is None:
        section = BytesTokenizer(kind="bytes")
        changes: dict[str, Any] = (
            {} if wanted.preset else {"tokenizer": {"kind": "bytes"}, "model.config.vocab_size": 256}
        )
        return _Tokens(changes, load_tokenizer(section), None)
    if str(named).startswith(HUB):
        name, _, revision = str(named).removeprefix(HUB).partition("@")
        found = fetch(name, commit_of(name, revision), "tokenizer.json", MOST_TOKENIZER_BYTES)
        if found is None:
            raise CorpusError(f"{name} has no tokenizer.json on the Hugging Face hub.", "Name another model.")
        path = found
    else:
        path = UserPath(named)
        path = path / "tokenizer.json" if path.is_dir() else path
    digest = file_digest(path, "tokenizer")
    if path.stat().st_size > MOST_STORED_BYTES:
        raise CorpusError(
            f"The tokenizer {printable(path)} is too large to travel with the run: it has more than "
            f"{MOST_STORED_BYTES >> 20} MiB.",
            "Use a smaller one.",
        )
    spec: dict[str, Any] = {"kind": "file", "sha256": digest}
    loaded = load_tokenizer(FileTokenizer.model_validate(spec), path)
    if model is None:
        return _Tokens({"tokenizer": spec, "model.config.vocab_size": loaded.vocabulary_size}, loaded, path)
    spec |= model.separator(loaded)
    return _Tokens({"tokenizer": spec}, load_tokenizer(FileTokenizer.model_validate(spec), path, has_prefix=True), path)


def _most_tokens(wanted: Wanted) -> int | None:
    """Return the training tokens that a run needs, with a margin: without a preset, the largest one of them."""
    if wanted.is_all:
        return None
    budgets = [PRESETS[name]["run"]["tokens"] for name in PRESETS if wanted.preset in (None, name)]
    return int(MARGIN * max(budgets))


def _kind_of(sources: Sequence[Source]) -> bool:
    """Return whether the sources have dialogues. Raises CorpusError if only some do."""
    kinds = {each.is_dialogues: each.name for each in sources}
    if len(kinds) == 2:
        raise CorpusError(
            f"{kinds[True]} has dialogues, and {kinds[False]} has text; a run is taught either.",
            "Name only the one or the other with --corpus; --text-field names the column that is used.",
        )
    return next(iter(kinds))


def _digest(template: str) -> str:
    return hashlib.sha256(template.encode(errors="replace")).hexdigest()


def _template(template: Path | None, model: GivenModel | None) -> str | None:
    """Return the chat template that a run of dialogues gets; None: ChatML. Raises CorpusError.

    It contains the texts of the model's special tokens that it names, as transformers gives them to a template.
    """
    if template is not None and f"{template}" == CHATML and not template.exists():
        return None
    if template is not None:
        return with_values(read_template(template), {} if model is None else model.settings.tokens)
    found = None if model is None else model.template
    if isinstance(found, CorpusError):
        raise found
    return found
