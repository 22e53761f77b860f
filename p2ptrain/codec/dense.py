"""One number an element: ``fp32`` (lossless) and ``bf16`` (relative error at most 2^-8). The reference codecs.

Message: n little-endian numbers, nothing else.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.codec.door import (
    CHUNK,
    LARGEST_MAGNITUDE,
    Buffer,
    CodecTerms,
    Staging,
    check_lengths,
    check_snapshot,
    chunks,
)
from p2ptrain.errors import RemoteError


@dataclass(frozen=True, slots=True)
class DenseCodec:
    """Sends each element as one number of ``dtype``, rounded to nearest."""

    name: str
    dtype: torch.dtype

    def encoded_size(self, terms: CodecTerms) -> int:
        return terms.elements * self.dtype.itemsize

    def encode(self, snapshot: Tensor, terms: CodecTerms) -> bytes:
        check_snapshot(snapshot, terms)
        numbers = torch.empty(CHUNK, dtype=self.dtype)
        raw = numbers.view(torch.uint8).numpy().data
        message = io.BytesIO()
        for begin, end in chunks(terms.elements):
            if not _within_limits(snapshot[begin:end]):
                raise ValueError(f"snapshot is not finite or beyond {LARGEST_MAGNITUDE:.3g}")
            numbers[: end - begin].copy_(snapshot[begin:end])
            message.write(raw[: (end - begin) * self.dtype.itemsize])
        return message.getvalue()

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        mine, theirs = check_lengths(mine, theirs, self.encoded_size(terms))
        width = self.dtype.itemsize
        staging = Staging(CHUNK * width)
        result = torch.empty(terms.elements, dtype=torch.float32)
        for begin, end in chunks(terms.elements):
            part = result[begin:end]
            part.copy_(staging.load(theirs[begin * width : end * width]).view(self.dtype)[: end - begin])
            if not _within_limits(part):
                raise RemoteError(f"message carries numbers that are not finite or beyond {LARGEST_MAGNITUDE:.3g}")
            part.sub_(staging.load(mine[begin * width : end * width]).view(self.dtype)[: end - begin])
        return result


def _within_limits(values: Tensor) -> bool:
    """False also for NaN, which both extremes inherit and no comparison admits."""
    lowest, highest = torch.aminmax(values)
    return bool(lowest >= -LARGEST_MAGNITUDE) and bool(highest <= LARGEST_MAGNITUDE)


FP32 = DenseCodec("fp32", torch.float32)
BF16 = DenseCodec("bf16", torch.bfloat16)
