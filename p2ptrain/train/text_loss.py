"""Loss of a model on any text: a stream of tokens is cut into windows, and each token is predicted at most once.

A window is T+1 tokens, T of which the model reads::

    stride S = T (the default)     [c p p p p p p p]
                                                  [c p p p p p p p]          c: read, not predicted here
    stride S < T                   [c p p p p p p p]                         p: predicted
                                         [c c c c c p p p]

Without a prefix the first token of the text is never predicted. A model that was trained with a token at the beginning
of each sequence, as Llama and Gemma, reads that prefix before each window and predicts the first token, too.

Dimension letters: B windows of a batch, T tokens that the model reads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2ptrain.train.evaluate import BATCH_LOGITS, GoesOn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenWindow(NamedTuple):
    """Consecutive tokens, the last of which are predicted."""

    ids: np.ndarray  # [up to T+1] int64
    predicted: int


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Rule by which a stream of tokens is cut into windows.

    Args:
        length: tokens T that the model reads at once, the prefix among them.
        stride: tokens S by which a window begins after the one before.
        prefix: ids at the beginning of each window.
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
        known = 0 if self.prefix else 1  # tokens at the beginning of the buffer that are not predicted
        before = np.asarray(self.prefix, dtype=np.int64)
        buffer = before[:0]
        for chunk in chunks:
            buffer = np.concatenate([buffer, chunk.astype(np.int64)])
            begin = 0
            while len(buffer) - begin >= size:
                yield TokenWindow(np.concatenate([before, buffer[begin : begin + size]]), size - known)
                begin, known = begin + self.stride, self.context
            buffer = buffer[begin:]
        if len(buffer) > known:
            yield TokenWindow(np.concatenate([before, buffer]), len(buffer) - known)


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
    was_training = module.training
    module.train(False)
    nats, tokens = 0.0, 0
    try:
        with torch.no_grad():
            for batch in _batches(windows, module.config.get_text_config().vocab_size):
                nats += _summed_nats(module, batch)
                tokens += sum(window.predicted for window in batch)
                if not goes_on(tokens, wanted):
                    break
    finally:
        module.train(was_training)
    return TextLoss(nats, tokens)


def _batches(windows: Iterable[TokenWindow], vocabulary: int) -> Iterator[Sequence[TokenWindow]]:
    """Group windows of one shape, as many as have ``BATCH_LOGITS``."""
    for (length, _), alike in groupby(windows, key=lambda window: (len(window.ids), window.predicted)):
        most = max(1, BATCH_LOGITS // (length * vocabulary))
        while batch := list(islice(alike, most)):
            yield batch


def _summed_nats(module: PreTrainedModel, batch: Sequence[TokenWindow]) -> float:
    predicted = batch[0].predicted
    ids = torch.from_numpy(np.stack([window.ids for window in batch])).to(module.device)  # [B, T+1]
    model: Any = module
    logits: Tensor = model(input_ids=ids[:, :-1], use_cache=False).logits[:, -predicted:]  # [B, predicted, V]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, -predicted:].flatten(), reduction="sum"
    )
    return float(loss)
