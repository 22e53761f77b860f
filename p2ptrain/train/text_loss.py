"""Loss of a model on any text, or on the answers of dialogues; each token is predicted at most once.

A text is a stream of tokens, which is cut into windows. Dialogues come in rows, as training packs them.

A window is T+1 tokens, T of which the model reads::

    stride S = T (the default)     [c p p p p p p p]
                                                  [c p p p p p p p]          c: read, not predicted here
    stride S < T                   [c p p p p p p p]                         p: predicted
                                         [c c c c c p p p]

Without a prefix the first token of the text is never predicted. A model that was trained with a token at the beginning
of each document, as Llama and Gemma, reads that prefix also before a window in the middle of one.

Dimension letters: B windows of a batch, T tokens that the model reads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2ptrain.ports import GoesOn
from p2ptrain.tokens.packing import IGNORED
from p2ptrain.train.evaluate import BATCH_LOGITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenWindow(NamedTuple):
    """Consecutive tokens, the last of which are predicted."""

    ids: np.ndarray  # [up to T+1] int64
    predicted: int


class AnswerRow(NamedTuple):
    """Row of one or more dialogues, cut after its last predicted token: int64 [up to T] each."""

    inputs: np.ndarray
    labels: np.ndarray
    """The token after each; ``IGNORED`` where none is predicted."""
    positions: np.ndarray | None
    """Positions in the dialogue, which keep several apart; None: the row has one dialogue."""

    @property
    def predicted(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORED))


class _Batch(NamedTuple):
    """Sequences of one shape, and what is predicted of them."""

    inputs: np.ndarray  # [B, T] int64
    labels: np.ndarray  # [B, up to T] int64, of the last tokens; IGNORED where none is predicted
    positions: np.ndarray | None  # [B, T] int64
    predicted: int


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Rule by which a stream of tokens is cut into windows.

    Args:
        length: tokens T that the model reads at once, the prefix among them.
        stride: tokens S by which a window begins after the one before.
        prefix: ids at the beginning of each window, unless a document begins there, which has them already.
    """

    length: int
    stride: int
    prefix: tuple[int, ...] = ()

    @classmethod
    def of(cls, length: int, stride: int | None = None, prefix: tuple[int, ...] = ()) -> WindowRule:
        """Return a rule; without a stride, windows do not overlap."""
        return cls(length, length - len(prefix) if stride is None else stride, prefix)

    @property
    def context(self) -> int:
        """Number of tokens that a window shares with the one before."""
        return self.length + 1 - len(self.prefix) - self.stride

    def windows(self, chunks: Iterable[np.ndarray]) -> Iterator[TokenWindow]:
        """Yield the windows of a stream that arrives in chunks; the last one may be shorter."""
        size = self.stride + self.context
        known: int | None = None  # tokens at the beginning of the buffer that are not predicted
        buffer = np.zeros(0, dtype=np.int64)
        for chunk in chunks:
            buffer = np.concatenate([buffer, chunk.astype(np.int64)])
            begin = 0
            while len(buffer) - begin >= size:
                known = self._known_at_start(buffer) if known is None else known
                yield TokenWindow(self._after_prefix(buffer[begin : begin + size]), size - known)
                begin, known = begin + self.stride, self.context
            buffer = buffer[begin:]
        known = self._known_at_start(buffer) if known is None else known
        if len(buffer) > known:
            yield TokenWindow(self._after_prefix(buffer), len(buffer) - known)

    def _begins(self, ids: np.ndarray) -> bool:
        return bool(self.prefix) and ids[: len(self.prefix)].tolist() == [*self.prefix]

    def _known_at_start(self, ids: np.ndarray) -> int:
        """Return how many of a text's first tokens are not predicted: its prefix, or one token without a prefix."""
        if not self.prefix:
            return 1
        return len(self.prefix) if self._begins(ids) else 0

    def _after_prefix(self, ids: np.ndarray) -> np.ndarray:
        return ids if self._begins(ids) else np.concatenate([np.asarray(self.prefix, dtype=np.int64), ids])


@dataclass(frozen=True, slots=True)
class TextLoss:
    """Cross entropy of a text."""

    nats: float  # sum over the predicted tokens
    tokens: int  # predicted tokens

    @property
    def per_token(self) -> float:
        """Mean cross entropy in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the loss per token; infinite beyond a float's range."""
        return math.exp(self.per_token) if self.per_token < math.log(1e308) else math.inf

    def bits_per_byte(self, text_bytes: int) -> float | None:
        """Return the bits per byte of the text that was predicted; None without such a text."""
        return self.nats / math.log(2) / text_bytes if text_bytes > 0 else None


def text_loss(
    module: PreTrainedModel,
    windows: Iterable[TokenWindow],
    goes_on: GoesOn = lambda read, wanted: True,
    wanted: int = 0,  # predicted tokens in total, for ``goes_on``; 0: unknown
) -> TextLoss:
    """Return the cross entropy of all predicted tokens, computed in the weights' type.

    No gradient, no random number, and the module's mode is restored. Memory is bounded for any text.
    """
    return _loss(module, _window_batches(windows, module.config.get_text_config().vocab_size), goes_on, wanted)


def answer_loss(
    module: PreTrainedModel,
    rows: Iterable[AnswerRow],
    goes_on: GoesOn = lambda read, wanted: True,
    wanted: int = 0,  # predicted tokens in total, for ``goes_on``; 0: unknown
) -> TextLoss:
    """Return the cross entropy of the answers of dialogues; see ``text_loss``.

    A row with ``positions`` needs a model that keeps its dialogues apart, as those of the runs do.
    """
    return _loss(module, _row_batches(rows, module.config.get_text_config().vocab_size), goes_on, wanted)


def _loss(module: PreTrainedModel, batches: Iterable[_Batch], goes_on: GoesOn, wanted: int) -> TextLoss:
    was_training = module.training
    module.train(False)
    nats, tokens = 0.0, 0
    try:
        with torch.no_grad():
            for batch in batches:
                nats += _summed_nats(module, batch)
                tokens += batch.predicted
                if not goes_on(tokens, wanted):
                    break
    finally:
        module.train(was_training)
    return TextLoss(nats, tokens)


def _window_batches(windows: Iterable[TokenWindow], vocabulary: int) -> Iterator[_Batch]:
    """Group windows of one shape, as many as have ``BATCH_LOGITS``."""
    for (length, predicted), alike in groupby(windows, key=lambda window: (len(window.ids), window.predicted)):
        most = max(1, BATCH_LOGITS // (length * vocabulary))
        while batch := list(islice(alike, most)):
            ids = np.stack([window.ids for window in batch])  # [B, T+1]
            yield _Batch(ids[:, :-1], ids[:, -predicted:], None, predicted * len(batch))


def _row_batches(rows: Iterable[AnswerRow], vocabulary: int) -> Iterator[_Batch]:
    """Group rows of one shape, as many as have ``BATCH_LOGITS``."""
    for (length, is_packed), alike in groupby(rows, key=lambda row: (len(row.inputs), row.positions is not None)):
        most = max(1, BATCH_LOGITS // (length * vocabulary))
        while batch := list(islice(alike, most)):
            inputs, labels = np.stack([row.inputs for row in batch]), np.stack([row.labels for row in batch])
            positions = np.stack([row.positions for row in batch if row.positions is not None]) if is_packed else None
            yield _Batch(inputs, labels, positions, sum(row.predicted for row in batch))


def _summed_nats(module: PreTrainedModel, batch: _Batch) -> float:
    inputs, labels = (torch.from_numpy(each).to(module.device) for each in (batch.inputs, batch.labels))
    places = {} if batch.positions is None else {"position_ids": torch.from_numpy(batch.positions).to(module.device)}
    model: Any = module
    logits: Tensor = model(input_ids=inputs, use_cache=False, **places).logits[:, -labels.shape[1] :]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return float(loss)
