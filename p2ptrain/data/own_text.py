"""A new run for an author's own text and tokenizer: what ``p2ptrain init --corpus --tokenizer`` writes and stores."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import printable
from p2ptrain.data.chat_template import CHATML
from p2ptrain.data.corpus import Tell, open_corpus, read_summary, rename_stream
from p2ptrain.data.dialogues import DEFAULT_MESSAGES, has_messages
from p2ptrain.data.figures import TextFigures, text_figures
from p2ptrain.data.file_store import FILES_FOLDER, FileStore, NamedFile
from p2ptrain.data.rows import first_line
from p2ptrain.data.sources import file_digest, unchanged
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.manifest import Manifest, create_run, name_change, preset, with_changes
from p2ptrain.manifest.fitting import fitted
from p2ptrain.manifest.sources import MAX_TOKENS, FileTokenizer

_NO_AUTHOR = "00" * 32
JSON_LINES = (".jsonl", ".ndjson")
DEFAULT_COLUMN = "text"
"""Column of the text if none is named: the usual name on the hub."""
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
    corpus: Path | None,
    tokenizer: Path | None,
    preset_name: str | None,
    text_field: str,
    run_name: str | None,
    cache: Path,
    tell: Tell,
    template: Path | None = None,
) -> NewRun:
    """Tokenize the author's text, choose the run's size, and create the run with its files: all of it, or nothing.

    Args:
        directory: the run's.
        corpus: the text; None: the preset's.
        tokenizer: a tokenizer.json; None: the preset's.
        preset_name: None: the size that fits the text.
        text_field: column of the text or of the messages in jsonl and parquet; empty: by its usual name.
        run_name: for people; None: the directory's name if the manifest allows it.
        cache: directory of token streams.
        tell: progress of tokenizing.
        template: a chat template; None: ChatML if the corpus has dialogues.

    Raises:
        CorpusError: a file is missing, unusable or changed while it was read, or the text is too short.
        ManifestError: the directory holds a run, no such preset, or a field is out of its bounds.
        HomeError: the cache or the directory cannot be written.
    """
    with contextlib.ExitStack() as stack:
        for path in filter(None, (tokenizer, corpus, template)):
            stack.enter_context(unchanged(path))
        changes: dict[str, Any] = name_change(directory, run_name)
        given: list[tuple[NamedFile, Path]] = []
        if tokenizer is not None:
            digest = file_digest(tokenizer, "tokenizer")
            loaded = load_tokenizer(FileTokenizer(kind="file", sha256=digest), tokenizer)
            changes |= {
                "tokenizer": {"kind": "file", "sha256": digest},
                "model.config.vocab_size": loaded.vocabulary_size,
            }
            given.append((NamedFile("tokenizer", "--tokenizer", digest), tokenizer))
        elif preset_name is None:
            changes |= {"tokenizer": {"kind": "bytes"}, "model.config.vocab_size": 256}
        if corpus is None:
            name, reason, figures = preset_name or "demo", "", None
        else:
            digest = file_digest(corpus, "corpus")
            text_format = detected_format(corpus)
            if text_format == "text" and text_field not in ("", DEFAULT_COLUMN):
                raise CorpusError(
                    f"{printable(corpus)} is plain text, which has no column {text_field!r}.",
                    "Omit --text-field, or name a jsonl or parquet file.",
                )
            given.append((NamedFile("corpus", "--data", digest), corpus))
            column = text_field or _column(corpus, text_format, template is not None)
            changes["corpus"] = {
                "kind": "file",
                "sha256": digest,
                "format": text_format,
                "text_field": column,
                "max_tokens": MAX_TOKENS,
            }
            if template is not None or (text_format != "text" and has_messages(corpus, text_format, column)):
                chosen = CHATML
                if template is not None:
                    chosen = file_digest(template, "chat template")
                    given.append((NamedFile("template", "--template", chosen), template))
                changes["corpus"]["template"] = chosen
            name, changes, reason, figures = _sized(corpus, tokenizer, preset_name, changes, cache, tell, template)
        kept: list[str] = []
        store = FileStore(directory / FILES_FOLDER)

        def store_files() -> None:
            kept.extend(file.what for file, path in given if store.adopt(file, path) is not None)

        manifest = create_run(directory, name, changes, reason, store_files)
    too_large = [file.what for file, _ in given if file.what not in kept]
    return NewRun(manifest, reason, figures, kept, too_large)


def _sized(
    corpus: Path,
    tokenizer: Path | None,
    preset_name: str | None,
    changes: Mapping[str, Any],
    cache: Path,
    tell: Tell,
    template: Path | None,
) -> tuple[str, dict[str, Any], str, TextFigures]:
    """Tokenize the text; return preset, changes, reason and figures. All of the text is used, if that is possible."""
    uncut = with_changes(preset(preset_name or "demo", _NO_AUTHOR), changes)
    opened = open_corpus(uncut, cache, corpus, tokenizer, tell, template_file=template)
    room = len(opened.tokens) * (PADDED if opened.is_packed else 1)
    changes = {**changes, "corpus": {**changes["corpus"], "max_tokens": _just_above(room)}}
    fit = fitted(opened.split.train_tokens, changes, preset_name)
    manifest = with_changes(preset(fit.preset, _NO_AUTHOR), fit.changes)
    if not opened.is_packed or manifest.training.sequence_length == opened.sequence_length:
        rename_stream(cache, uncut, manifest)
    else:  # rows of another length
        opened = open_corpus(manifest, cache, corpus, tokenizer, tell, template_file=template)
    summary = read_summary(manifest, cache)
    figures = text_figures(manifest, len(opened.tokens), opened.tokenizer.vocabulary_size, summary)
    return fit.preset, fit.changes, fit.reason, figures


def _column(path: Path, text_format: str, is_chat: bool) -> str:
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
    if head.is_packed:
        raise CorpusError(f"{printable(path)} is packed, and its content is not jsonl.", "Unpack it first.")
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
