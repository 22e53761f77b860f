"""Dense codecs, one number per element: ``fp32`` (lossless), ``bf16`` and ``fp16``. The reference codecs.

Message: n little-endian numbers, nothing else.

fp16 has eleven significant bits, bf16 has eight. fp16 is limited to 65504, and below 2^-14 its error is absolute,
2^-25. A snapshot beyond a codec's range is rejected, not clamped: clamping would hide the disagreement between two
weights that are both too large, and weights of that size mean that training has diverged.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError
from p2ptrain.codec.base import (
    CHUNK,
    LARGEST_MAGNITUDE,
    Buffer,
    CodecTerms,
    Reader,
    Staging,
    check_length,
    check_lengths,
    check_magnitude,
    check_snapshot,
    chunks,
    magnitude,
    read_all,
    read_difference,
)


@dataclass(frozen=True, slots=True)
class DenseCodec:
    """Codec with one number of ``dtype`` per element, rounded to nearest."""

    name: str
    dtype: torch.dtype
    largest: float = LARGEST_MAGNITUDE
    """Largest magnitude allowed in a snapshot or a message."""
    needs_feedback: ClassVar[bool] = False

    def encoded_size(self, terms: CodecTerms) -> int:
        return terms.elements * self.dtype.itemsize

    def encode(self, snapshot: Tensor, terms: CodecTerms) -> bytes:
        check_snapshot(snapshot, terms)
        numbers = torch.empty(CHUNK, dtype=self.dtype)
        raw = numbers.view(torch.uint8).numpy().data
        message = io.BytesIO()
        for begin, end in chunks(terms.elements):
            check_magnitude(magnitude(snapshot[begin:end]), self.largest)
            numbers[: end - begin].copy_(snapshot[begin:end])
            message.write(raw[: (end - begin) * self.dtype.itemsize])
        return message.getvalue()

    def decode(self, message: Buffer, terms: CodecTerms) -> Tensor:
        view = check_length(message, self.encoded_size(terms))
        return read_all(self._reader(view, trusted=False), terms.elements, CHUNK)

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        own, other = check_lengths(mine, theirs, self.encoded_size(terms))
        return read_difference(
            self._reader(own, trusted=True), self._reader(other, trusted=False), terms.elements, CHUNK
        )

    def _reader(self, message: memoryview, trusted: bool) -> Reader:
        width = self.dtype.itemsize
        staging = Staging(CHUNK * width)

        def read(begin: int, end: int, buffer: Tensor) -> Tensor:
            numbers = staging.load(message[begin * width : end * width]).view(self.dtype)
            part = buffer[: end - begin].copy_(numbers[: end - begin])
            if not trusted and not magnitude(part) <= self.largest:  # False for NaN
                raise RemoteError(f"message carries numbers that are not finite or beyond {self.largest:.3g}")
            return part

        return read


FP32 = DenseCodec("fp32", torch.float32)
BF16 = DenseCodec("bf16", torch.bfloat16)
FP16 = DenseCodec("fp16", torch.float16, largest=65504.0)
