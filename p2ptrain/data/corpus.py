"""Corpus for training: numbered sequences of tokens, and a held-out part that all peers share.

Dimension letters: B sequences of a batch, T = ``sequence_length``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, ManifestError
from p2ptrain.data.chat_template import CHATML
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.dialogues import read_dialogues
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.packed_stream import code_count, load_template, rows_of_dialogues, run_warnings, template_name
from p2ptrain.data.packing import IGNORED, decoded_rows
from p2ptrain.data.rows import ROWS_VERSION, TextCounts
from p2ptrain.data.sources import (
    EMPTY,
    INIT_WITH_FILES,
    InterruptedCorpusError,
    check_digest,
    read_pieces,
    unchanged,
)
from p2ptrain.data.split import Split, split_rows, split_stream
from p2ptrain.data.stream import Unfinished, open_stream, stream_path, token_type, tokenize
from p2ptrain.data.tokenizer import Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import Tensor

    from p2ptrain.manifest import Manifest

STREAM_VERSION = 4
"""Version of the token stream. Raise it when the same corpus and tokenizer would yield another stream, so that old
caches are not used."""

PACKING_VERSION = 3
"""Version of rows of dialogues. Raise it when the same dialogues and template would yield other rows."""

Tell = Callable[[int, int | None], None]
"""Progress callback: tokens of the stream so far, and the maximum at its end (None: unknown)."""

Report = Callable[[TextCounts, int], None]
"""Callback for what was read, now or when the stream was built, and the tokens of the stream."""

Warn = Callable[[str], None]
"""Callback that gets a sentence, without its full stop, on what the tokenizer loses of the text."""


@dataclass(frozen=True, slots=True)
class TextSummary:
    """What was read of a corpus for its token stream; saved beside it."""

    counts: TextCounts
    warnings: list[str]
    """Sentences, without their full stops, on what the tokenizer loses of the text."""
    end_of_turn: str = ""
    """Text that ends an answer in dialogues; "" if there are none, or it cannot be told."""


HASHED_BYTES = 1 << 30
"""Maximum size of a named file that is checked even though its tokens are cached: about a second of hashing. Larger
files are accepted unchecked. Guess: hash rates of slow disks would settle it."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids and the positions of the sequences in them.

    Opening takes constant time, plus about a second to check a file that is named again.
    """

    tokens: np.ndarray  # [tokens], any unsigned type, memory-mapped; codes of ``packing`` if the corpus is packed
    split: Split
    tokenizer: Tokenizer
    is_packed: bool = False
    """Whether sequences are rows of dialogues, of which training predicts the answers alone."""
    end_of_turn: str = ""
    """Text that ends an answer, as ``TextSummary`` has it."""

    @property
    def sequence_length(self) -> int:
        return self.split.sequence_length

    @property
    def train_sequences(self) -> int:
        """Number of training sequences; ``batch`` takes indices below this."""
        return self.split.train_sequences

    @property
    def held_out_tokens(self) -> int:
        return self.split.held_out_tokens

    def batch(self, indices: Sequence[int]) -> Tensor:
        """Return training sequences, int64 on the host: [B, T+1]. Inputs are ``[:, :-1]``, targets ``[:, 1:]``.

        Of dialogues [B, 3, T]: inputs, labels (``IGNORED`` where nothing is predicted) and positions.
        """
        return self._gather([self.split.train_start(index) for index in indices])

    def validation_batches(self, most_tokens: int, batch_sequences: int) -> Iterator[Tensor]:
        """Yield held-out sequences as ``batch`` does, B up to ``batch_sequences``: the same ones on every machine.

        At most ``most_tokens`` predicted tokens (but at least one sequence), evenly spaced over the held-out part.
        """
        total = self.split.held_out_sequences
        count = max(1, min(total, most_tokens // self.sequence_length))
        starts = [self.split.held_out_start(place * total // count) for place in range(count)]
        for first in range(0, count, batch_sequences):
            yield self._gather(starts[first : first + batch_sequences])

    def prompt_ids(self) -> list[int]:
        """Return the beginning of a held-out dialogue, up to its first answer; empty if the corpus has none."""
        if not self.is_packed:
            return []
        inputs, labels, _ = self._gather([self.split.held_out_start(0)])[0]
        return inputs[: 1 + int((labels != IGNORED).nonzero()[0])].tolist()

    def _gather(self, starts: Sequence[int]) -> Tensor:
        import torch  # not above: commands that only count tokens do without

        if self.is_packed:
            rows = np.stack([self.tokens[start : start + self.sequence_length] for start in starts])
            return torch.from_numpy(np.stack(decoded_rows(rows), axis=1))
        span = self.sequence_length + 1
        rows = np.stack([self.tokens[start : start + span] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))


def open_corpus(
    manifest: Manifest,
    cache: Path,  # directory of token streams, created if missing
    data: Path | None = None,  # the owner's corpus file, if the run names one by digest
    tokenizer_file: Path | None = None,  # the owner's tokenizer.json, if the run names one by digest
    tell: Tell = lambda tokens, most: None,  # called repeatedly while the stream is built
    report: Report = lambda counts, tokens: None,  # called once, unless that is not known
    warn: Warn = lambda sentence: None,  # called after that
    template_file: Path | None = None,  # the owner's chat template, if the run names one by digest
) -> Corpus:
    """Open the run's corpus and build its token stream if it is not cached.

    A cached stream needs no ``data``: its name contains the digest of the source file. A file that is given anyway must
    have that digest.

    Raises:
        CorpusError: unreadable, empty, too short, mostly rows without text, changed meanwhile, wrong digest, not named,
            not reachable, unknown to the tokenizer, or the chat template does not render it.
        ManifestError: the tokenizer has more ids than the model.
        HomeError: the cache cannot be written or its disk is full.
    """
    check_named(manifest, data, tokenizer_file, has_stream(manifest, cache), template_file)
    tokenizer = tokenizer_of(manifest, tokenizer_file)
    check_vocabulary(manifest, tokenizer)
    built: list[TextSummary] = []
    is_packed = bool(template_name(manifest.corpus))
    tokens = open_stream(
        cache,
        key_of(manifest),
        code_count(tokenizer.vocabulary_size) if is_packed else tokenizer.vocabulary_size,
        lambda unfinished: (
            _build_packed(manifest, tokenizer, data, template_file, built.append, tell, unfinished)
            if is_packed
            else _build(manifest, tokenizer, data, built.append, tell, unfinished)
        ),
    )
    summary = built[0] if built else read_summary(manifest, cache)
    if summary is not None:
        report(summary.counts, len(tokens))
        for sentence in summary.warnings:
            warn(sentence)
    end_of_turn = "" if summary is None else summary.end_of_turn
    return Corpus(tokens, split_of(manifest, len(tokens)), tokenizer, is_packed, end_of_turn)


def split_of(manifest: Manifest, tokens: int) -> Split:
    """Return the training and held-out sequences of a stream of ``tokens`` tokens. Raises CorpusError if too short."""
    split = split_rows if template_name(manifest.corpus) else split_stream
    return split(tokens, manifest.training.sequence_length, manifest.corpus.validation_fraction)


def check_vocabulary(manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Raise ManifestError if the tokenizer has more ids than the model."""
    vocabulary, found = manifest.model.config.vocab_size, tokenizer.vocabulary_size
    if found > vocabulary:
        remedy = f"Set model.config.vocab_size to {found} before the run is signed."
        if manifest.model.init is not None:  # its weights have no more
            remedy = (
                "Begin from the model with its own tokenizer, or from one that was enlarged by "
                f"resize_token_embeddings({found}) of transformers."
            )
        raise ManifestError(
            f"The tokenizer has {found:,} ids, but the model has only {vocabulary:,}.",
            f"{remedy} If the run is not yours, ask its author.",
        )


def check_named(
    manifest: Manifest,
    data: Path | None,
    tokenizer_file: Path | None,
    is_built: bool,
    template_file: Path | None = None,
) -> None:
    """Raise CorpusError if a named file is not one that the run names by digest, or the run names an empty one.

    The digest of ``data`` is checked if its tokens are cached (``is_built``); otherwise building them checks it.
    """
    corpus, tokenizer = manifest.corpus, manifest.tokenizer
    for what, spec in (("corpus", corpus), ("tokenizer", tokenizer)):
        if spec.kind == "file" and spec.sha256 == EMPTY:
            raise CorpusError(
                f"This run's {what} is an empty file.",
                "Name a whole file before the run is signed. If the run is not yours, ask its author.",
            )
    if data is not None and corpus.kind != "file":
        found = f"{corpus.name}, which ships with p2ptrain" if corpus.kind == "builtin" else f"{corpus.name} of the hub"
        raise CorpusError(
            f"--data names {data}, but this run's text is {found}.",
            f"Omit --data. To train on that file, begin another run: {INIT_WITH_FILES}",
        )
    if tokenizer_file is not None and tokenizer.kind != "file":
        found = "bytes" if tokenizer.kind == "bytes" else f"that of {tokenizer.name} of the hub"
        raise CorpusError(
            f"--tokenizer names {tokenizer_file}, but this run's tokenizer is {found}.",
            f"Omit --tokenizer. To train with that file, begin another run: {INIT_WITH_FILES}",
        )
    if template_file is not None and template_name(corpus) in ("", CHATML):
        found = "has no dialogues" if not template_name(corpus) else f"uses the template {CHATML}"
        raise CorpusError(
            f"--template names {template_file}, but this run {found}.",
            "Omit --template. To train with that file, begin another run: p2ptrain init NEW_RUN --corpus FILE "
            "--template FILE",
        )
    if data is not None and corpus.kind == "file" and is_built and _size(data) <= HASHED_BYTES:
        check_digest(data, corpus.sha256, "corpus")


def _size(data: Path) -> int:
    try:
        return data.stat().st_size
    except OSError:  # check_digest reports the cause
        return 0


def _build(
    manifest: Manifest,
    tokenizer: Tokenizer,
    data: Path | None,
    summarize: Callable[[TextSummary], None],
    tell: Tell,
    unfinished: Unfinished,
) -> Iterator[np.ndarray]:
    """Yield the ids of the stream, then check what was read: until then the stream has no name in the cache."""
    counts = TextCounts()
    check = FidelityCheck(tokenizer, counts)
    most = _most_tokens(manifest)
    left = None if most is None else most - unfinished.tokens
    position = None
    if unfinished.position is not None:
        position = unfinished.position["source"]
        check.resume(unfinished.position["check"])
    try:
        with contextlib.nullcontext() if data is None else unchanged(data):
            pieces = check.reading(read_pieces(manifest.corpus, data, counts, position))
            for chunk in check.writing(tokenize(pieces, tokenizer, left, tokenizer.prefix)):
                tell(unfinished.tokens + len(chunk.ids), most)
                yield chunk.ids
                if chunk.position is not None:
                    unfinished.save({"source": chunk.position, "check": check.state()})
            counts.check()
    except CorpusError as error:
        if not isinstance(error, InterruptedCorpusError):
            unfinished.forget()
        raise
    counts.where = ""
    counts.is_cut = most is not None and unfinished.tokens >= most
    summary = TextSummary(counts, list(check.warnings()))
    files.replace(_summary_path(unfinished.path), json.dumps(asdict(summary)).encode())
    summarize(summary)


def _build_packed(
    manifest: Manifest,
    tokenizer: Tokenizer,
    data: Path | None,
    template_file: Path | None,
    summarize: Callable[[TextSummary], None],
    tell: Tell,
    unfinished: Unfinished,
) -> Iterator[np.ndarray]:
    """Yield the codes of the rows of a corpus of dialogues; see ``_build``."""
    counts, most = TextCounts(), _most_tokens(manifest)
    check = FidelityCheck(tokenizer, counts, is_packed=True)
    corpus = manifest.corpus
    assert corpus.kind != "builtin"  # which has no template
    with (
        contextlib.nullcontext() if data is None else unchanged(data),
        load_template(corpus, tokenizer, template_file) as template,
    ):
        dialogues = read_dialogues(corpus, data, counts)
        encoder = ChatEncoder(template, tokenizer)
        length, is_hub = manifest.training.sequence_length, corpus.kind == "hub"
        for row in rows_of_dialogues(length, tokenizer, encoder, dialogues, counts, check, most, is_hub):
            yield row
            tell(unfinished.tokens, most)
        counts.check()
    counts.where = ""
    counts.is_cut = most is not None and unfinished.tokens + manifest.training.sequence_length > most
    found = [*run_warnings(counts, manifest), *check.warnings()]
    summary = TextSummary(counts, found, encoder.end_of_turn)
    files.replace(_summary_path(unfinished.path), json.dumps(asdict(summary)).encode())
    summarize(summary)


def read_summary(manifest: Manifest, cache: Path) -> TextSummary | None:
    """Return what was read for the cached tokens; None if they, or the summary beside them, are missing."""
    try:
        path = _summary_path(stream_path(cache, key_of(manifest)))
        saved = json.loads(path.read_bytes())
        return TextSummary(TextCounts(**saved["counts"]), saved["warnings"], saved.get("end_of_turn", ""))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def rename_stream(cache: Path, before: Manifest, after: Manifest) -> None:
    """Keep the cached tokens of ``before`` for ``after``, whose text is the same, with another ``max_tokens``."""
    old, new = (stream_path(cache, key_of(each)) for each in (before, after))
    with contextlib.suppress(OSError):  # then they are built again
        _summary_path(old).replace(_summary_path(new))
        old.replace(new)


def _summary_path(stream: Path) -> Path:
    return stream.with_suffix(".json")


def _most_tokens(manifest: Manifest) -> int | None:
    """Return the token limit of the corpus; None for built-in texts, which are short and read completely."""
    return None if manifest.corpus.kind == "builtin" else manifest.corpus.max_tokens


def has_stream(manifest: Manifest, cache: Path) -> bool:
    """Return whether the run's tokens are cached; False if the cache cannot be read."""
    try:
        return stream_path(cache, key_of(manifest)).exists()
    except OSError:
        return False


def most_stream_bytes(manifest: Manifest) -> int:
    """Return the maximum size of the run's tokens in the cache; 0 for built-in texts, which take a few megabytes."""
    most_ids = 256 if manifest.tokenizer.kind == "bytes" else manifest.model.config.vocab_size
    if template_name(manifest.corpus):
        most_ids = code_count(most_ids)
    return token_type(most_ids).itemsize * (_most_tokens(manifest) or 0)


def key_of(manifest: Manifest) -> str:
    """Return the cache key of a run's tokens."""
    has_prefix = manifest.model.init is not None and manifest.tokenizer.kind != "bytes"
    return stream_key(manifest.corpus, manifest.tokenizer, manifest.training.sequence_length, has_prefix)


def stream_key(
    corpus: BaseModel,
    tokenizer: BaseModel,
    sequence_length: int = 0,  # only rows of dialogues depend on it
    has_prefix: bool = False,  # documents begin as the tokenizer's own post-processor says
) -> str:
    """Return the cache key of a corpus and tokenizer: 32 hexadecimal digits."""
    description = {
        "version": STREAM_VERSION,
        "corpus": corpus.model_dump(mode="json", exclude={"validation_fraction"}),
        "tokenizer": tokenizer.model_dump(mode="json"),
    }
    if getattr(corpus, "kind", "") == "hub" or getattr(corpus, "format", "text") != "text":
        description["rows"] = ROWS_VERSION
    if getattr(corpus, "template", ""):
        description |= {"packing": PACKING_VERSION, "row": sequence_length}
    elif has_prefix:
        description["prefix"] = True
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
