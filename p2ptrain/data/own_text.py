"""A new run for an author's own text and tokenizer: what ``p2ptrain init --corpus --tokenizer`` writes and stores."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import printable
from p2ptrain.data.chat_template import CHATML, read_template, with_values
from p2ptrain.data.corpus import Tell, check_vocabulary, open_corpus, read_summary, rename_stream
from p2ptrain.data.dialogues import DEFAULT_MESSAGES, has_messages
from p2ptrain.data.figures import TextFigures, text_figures
from p2ptrain.data.file_store import FILES_FOLDER, FileStore, NamedFile
from p2ptrain.data.given_model import GivenModel
from p2ptrain.data.hub import HubFile, split_files
from p2ptrain.data.packed_stream import UnansweredError, enough_tokens
from p2ptrain.data.published_settings import template_copy
from p2ptrain.data.rows import RowFile
from p2ptrain.data.sources import file_digest, hub_errors, hub_name, unchanged
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.data.unpacking import first_line
from p2ptrain.data.weight_files import adopt
from p2ptrain.manifest import Manifest, create_run, name_change, preset, with_changes
from p2ptrain.manifest.continuing import continued, nearest_preset
from p2ptrain.manifest.decoder import MAX_LOGITS
from p2ptrain.manifest.fitting import FittedRun, continued_run, fitted
from p2ptrain.manifest.sources import MAX_TOKENS, FileTokenizer, HubCorpus, HubTokenizer

_NO_AUTHOR = "00" * 32
HubTable = dict[str, Any]
"""Table of a manifest that names something on the hub: kind, name and revision."""
JSON_LINES = (".jsonl", ".ndjson")
TABLES = {".csv": ("commas and quotes", ""), ".tsv": ("tabs", ', dialect="excel-tab"')}
"""By file extension of a table: what separates its columns, and the argument of Python's csv.DictReader."""
TABLE_WARNING = (
    "{0} is read as plain text, with its {1}. To use a column of a table, convert it first (python3 -c 'import csv, "
    "json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin{2})]' < {0} > corpus.jsonl)"
)
"""Warning, without its full stop."""
DEFAULT_COLUMN = "text"
"""Column of the text if none is named: the usual name on the hub."""
LONGEST_ROW = 2_048
"""Tokens up to which rows are lengthened for long dialogues, unless a published model says how many it reads: as those
of the largest preset."""
PADDED = 2
"""Factor for the padding that rows of another length may need."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that was created for an author's files."""

    manifest: Manifest
    reason: str
    """Sentences on the size of the model; empty if no text was given."""
    figures: TextFigures | None
    """Figures of the text; None if none was given."""
    stored: list[str]
    """Files that travel with the run: corpus, tokenizer, template."""
    too_large: list[str]
    """Files that are too large to travel."""


def create(
    directory: Path,
    corpus: Path | HubTable | None,
    tokenizer: Path | HubTable | None,
    preset_name: str | None,
    text_field: str,
    run_name: str | None,
    cache: Path,
    tell: Tell,
    model: GivenModel | None = None,
    template: Path | None = None,
) -> NewRun:
    """Tokenize the author's text, choose the run's size, and create the run with its files: all of it, or nothing.

    Args:
        directory: the run's.
        corpus: the text, or a data set of the hub; None: the preset's.
        tokenizer: a tokenizer.json, or a model of the hub; None: the preset's.
        preset_name: None: the size that fits the text.
        text_field: column of the text or of the messages in jsonl and parquet; empty: by its usual name.
        run_name: for people; None: the directory's name if the manifest allows it.
        cache: directory of token streams.
        tell: progress of tokenizing.
        model: published model that the run continues, with its tokenizer if none is given.
        template: a chat template, or ``chatml``; None: if the corpus has dialogues, the model's own, else ChatML.

    Raises:
        CorpusError: a file is missing, unusable or changed while it was read, or the text is too short.
        ManifestError: the directory holds a run, no such preset, or a field is out of its bounds.
        HomeError: the cache or the directory cannot be written.
    """
    changes: dict[str, Any] = name_change(directory, run_name)
    if model is not None:
        preset_name = preset_name or nearest_preset(model.section)
        if None not in (tokenizer, model.tokenizer):
            model = model.without_settings()
        changes |= continued(model.section, preset_name)
        tokenizer = tokenizer or _tokenizer_of(model)
    of_hub, tokenizer = (None, tokenizer) if isinstance(tokenizer, Path) else (tokenizer, None)
    weights = () if model is None else model.weights
    template_file: Path | None = None
    with contextlib.ExitStack() as stack:
        own_template = None if _is_chatml(template) else template
        for path in (tokenizer, corpus, own_template, *(path for _, path in weights)):
            if isinstance(path, Path):
                stack.enter_context(unchanged(path))
        given: list[tuple[NamedFile, Path]] = []
        if tokenizer is not None:
            digest = file_digest(tokenizer, "tokenizer")
            loaded = load_tokenizer(FileTokenizer(kind="file", sha256=digest), tokenizer)
            changes["tokenizer"] = {"kind": "file", "sha256": digest}
            if model is None:
                changes["model.config.vocab_size"] = loaded.vocabulary_size
            else:
                changes["tokenizer"] |= model.separator(loaded)
            given.append((NamedFile("tokenizer", "--tokenizer", digest), tokenizer))
        elif of_hub is not None:
            found = load_tokenizer(HubTokenizer.model_validate(of_hub))
            changes["tokenizer"] = of_hub if model is None else of_hub | model.separator(found)
            if model is None:
                changes["model.config.vocab_size"] = found.vocabulary_size
        elif preset_name is None and model is None:
            changes |= {"tokenizer": {"kind": "bytes"}, "model.config.vocab_size": 256}
        if corpus is None:
            name, reason, figures = preset_name or "demo", "", None
            if model is not None:
                manifest = with_changes(preset(name, _NO_AUTHOR), changes)
                check_vocabulary(manifest, load_tokenizer(manifest.tokenizer, tokenizer))
        else:
            sample: RowFile
            if isinstance(corpus, Path):
                table: dict[str, Any] = {"kind": "file", "sha256": file_digest(corpus, "corpus")}
                given.append((NamedFile("corpus", "--data", table["sha256"]), corpus))
                sample, text_format = corpus, detected_format(corpus)
                table |= {"format": text_format, "max_tokens": MAX_TOKENS}
            else:
                sample = stack.enter_context(_first_file(corpus))
                table, text_format = dict(corpus), sample.format
            if text_format == "text" and text_field not in ("", DEFAULT_COLUMN):
                raise CorpusError(
                    f"{printable(str(corpus))} is plain text, which has no column {text_field!r}.",
                    "Omit --text-field, or name a jsonl or parquet file.",
                )
            column = text_field or _column(sample, text_format, template is not None)
            changes["corpus"] = table | {"text_field": column}
            if template is not None or (text_format != "text" and has_messages(sample, text_format, column)):
                template_file = _template_file(template, model)
                chosen = CHATML if template_file is None else file_digest(template_file, "chat template")
                if template_file is not None:
                    given.append((NamedFile("template", "--template", chosen), template_file))
                changes["corpus"]["template"] = chosen
            file = corpus if isinstance(corpus, Path) else None
            name, changes, reason, figures = _sized(
                file, tokenizer, preset_name, changes, cache, tell, model is not None, template_file
            )
            if figures is not None and file is not None and file.suffix.lower() in TABLES:
                told = TABLE_WARNING.format(printable(file), *TABLES[file.suffix.lower()])
                figures = replace(figures, warnings=[*figures.warnings, told])
        kept: list[str] = []
        folder = directory / FILES_FOLDER
        was_there, store = folder.exists(), FileStore(folder)

        def store_files() -> None:
            paths = {file.sha256: path for file, path in weights}
            try:
                kept.extend(file.what for file, path in given if store.adopt(file, path) is not None)
                if model is not None and model.kept is not None:
                    store.adopt(*model.kept)
                if weights and adopt([file for file, _ in weights], paths, store):
                    kept.append("weights")
            except BaseException:  # Ctrl+C, too
                if not was_there:
                    shutil.rmtree(folder, ignore_errors=True)
                raise

        manifest = create_run(directory, name, changes, reason, store_files)
    named = [*(file.what for file, _ in given), *(["weights"] if weights else [])]
    too_large = [what for what in named if what not in kept]
    return NewRun(manifest, reason, figures, kept, too_large)


def _template_file(template: Path | None, model: GivenModel | None) -> Path | None:
    """Return the file of the chat template that a run of dialogues gets; None: ChatML. Raises CorpusError.

    It contains the texts of the model's special tokens that it names, as transformers gives them to a template.
    """
    if _is_chatml(template):
        return None
    if template is not None and model is not None:
        source, values = read_template(template), model.settings.tokens
        return template if source == with_values(source, values) else template_copy(source, values)
    if template is not None or model is None:
        return template
    if isinstance(model.template, CorpusError):
        raise model.template
    return model.template


def _is_chatml(template: Path | None) -> bool:
    return f"{template}" == CHATML and template is not None and not template.exists()


@contextlib.contextmanager
def _first_file(corpus: HubTable) -> Iterator[HubFile]:
    """Yield the first file of a data set. Raises CorpusError, also for errors of the network while it is read."""
    spec = HubCorpus.model_validate(corpus)
    with hub_errors(hub_name(spec), "nothing was written"):
        yield split_files(spec)[0]


def _tokenizer_of(model: GivenModel) -> Path | HubTable:
    """Return the tokenizer of a published model. Raises CorpusError if it has none."""
    if model.tokenizer is not None:
        return model.tokenizer
    raise CorpusError(
        f"The model {model.name} has no tokenizer.json beside it.", "Name the model's own with --tokenizer FILE."
    )


def _sized(
    corpus: Path | None,
    tokenizer: Path | None,
    preset_name: str | None,
    changes: Mapping[str, Any],
    cache: Path,
    tell: Tell,
    is_continued: bool,
    template: Path | None,
) -> tuple[str, dict[str, Any], str, TextFigures]:
    """Tokenize the text; return preset, changes, reason and figures. All of the text is used, if that is possible."""
    uncut = with_changes(preset(preset_name or "demo", _NO_AUTHOR), changes)
    longest = _longest_row(uncut, is_continued)
    may_lengthen = is_continued or preset_name is None
    try:
        opened = open_corpus(uncut, cache, corpus, tokenizer, tell, template_file=template)
    except UnansweredError:
        if longest <= uncut.training.sequence_length:
            raise
        may_lengthen, uncut = True, with_changes(uncut, _rows_of(uncut, longest))
        opened = open_corpus(uncut, cache, corpus, tokenizer, tell, template_file=template)
    found = read_summary(uncut, cache)
    if found is None or not found.counts.is_cut:
        room = len(opened.tokens) * (PADDED if opened.is_packed else 1)
        changes = {**changes, "corpus": {**changes["corpus"], "max_tokens": _just_above(room)}}
    fit = _fit(opened.split.train_tokens, changes, preset_name, is_continued)
    manifest = with_changes(preset(fit.preset, _NO_AUTHOR), fit.changes)
    length = manifest.training.sequence_length
    enough = min(longest, enough_tokens(found.counts)) if opened.is_packed and found is not None else 0
    is_longer = may_lengthen and enough > length
    if is_longer:
        length = enough
        manifest = with_changes(manifest, _rows_of(manifest, length))
    if not opened.is_packed or length == opened.sequence_length:
        rename_stream(cache, uncut, manifest)
    else:
        opened = open_corpus(manifest, cache, corpus, tokenizer, tell, template_file=template)
    if is_longer or (opened.is_packed and length != uncut.training.sequence_length):  # another length pads otherwise
        changes = {**changes, **_rows_of(manifest, length)}
        fit = _fit(opened.split.train_tokens, changes, preset_name, is_continued)
        manifest = with_changes(preset(fit.preset, _NO_AUTHOR), fit.changes)
    if is_longer:
        fit = fit._replace(reason=f"{fit.reason} Rows have {length:,} tokens, as long dialogues need.")
    summary = read_summary(manifest, cache)
    figures = text_figures(manifest, len(opened.tokens), opened.tokenizer.vocabulary_size, summary)
    return fit.preset, fit.changes, fit.reason, figures


def _fit(tokens: int, changes: Mapping[str, Any], preset_name: str | None, is_continued: bool) -> FittedRun:
    """Choose preset and budget for a text of ``tokens`` training tokens."""
    if is_continued and preset_name is not None:
        return continued_run(tokens, changes, preset_name)
    return fitted(tokens, changes, preset_name)


def _longest_row(manifest: Manifest, is_continued: bool) -> int:
    """Return the tokens that a row of dialogues may have."""
    positions = manifest.model.config.max_position_embeddings if is_continued else LONGEST_ROW
    return min(positions, MAX_LOGITS // manifest.model.config.vocab_size)


def _rows_of(manifest: Manifest, length: int) -> dict[str, Any]:
    """Return the changes to a run for rows of ``length`` tokens, and about as many tokens in each step."""
    training = manifest.training
    return {
        "training.sequence_length": length,
        "training.sequences_per_step": max(1, training.tokens_per_step // length),
        "model.config.max_position_embeddings": max(length, manifest.model.config.max_position_embeddings),
    }


def _column(path: RowFile, text_format: str, is_chat: bool) -> str:
    """Return the usual name of the column that is used: of the messages if the first row has some."""
    if text_format != "text" and (is_chat or has_messages(path, text_format, DEFAULT_MESSAGES)):
        return DEFAULT_MESSAGES
    return DEFAULT_COLUMN


def _just_above(tokens: int) -> int:
    """Return a limit of at least 1,000 tokens that leaves nothing out, rounded up to three digits."""
    unit = 10 ** max(0, len(str(tokens)) - 3)
    return min(MAX_TOKENS, max(1000, (tokens // unit + 1) * unit))


def detected_format(path: Path) -> str:
    """Return text, jsonl or parquet, by the file's first bytes, or by a name such as ``rows.jsonl.gz``.

    Raises:
        CorpusError: unreadable, packed text, or JSON that is not one object per line.
    """
    head = first_line(path)
    if head.line.startswith(b"PAR1"):
        return "parquet"
    if any(suffix in JSON_LINES for suffix in path.suffixes) or _is_object(head.line):
        return "jsonl"
    if head.unpack:
        raise CorpusError(f"{printable(path)} is packed, and its content is not jsonl.", head.unpack)
    if path.suffix == ".json":
        raise CorpusError(
            f"{printable(path)} is JSON, but does not have one object per line.",
            "Convert it to one object per line (jsonl), for example with jq -c '.[]' FILE > corpus.jsonl",
        )
    return "text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
