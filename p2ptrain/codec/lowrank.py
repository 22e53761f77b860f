"""Codec ``lowrank`` for pseudo-gradients: each matrix as the product of two thin factors, quantized to int4.

The codec needs error feedback (``sim.lockstep.feedback``), which also carries the power iteration between messages.
Each message takes one iteration from the factor R of the last one::

    P = orthonormal(M R^T)       sent as int4, read back as P'
    R = least squares of M ~ P' R, sent as int4         M ~ P' R'

Fitting R against the decoded P' compensates the rounding of P. A matrix too small to gain from factors is sent as plain
int4.

Message: the ``int4`` encoding of all factors in sequence, each padded to whole blocks; for each matrix P by columns,
then R by rows, so that a scale nearly always belongs to one component. The decoder adds the components one by one: a
product of two int4 numbers is exact in fp32, so the sum is equal to the bit on every machine, unlike a matrix product.

``terms.matrices`` gives the matrices of a fragment. If it is empty, the fragment is one matrix of 2^k columns, close to
square, padded with zeros.

Sources: power iteration with a warm start, PowerSGD, Vogels et al., arXiv 1905.13727; low rank followed by int4 on
pseudo-gradients, DiLoCoX, arXiv 2506.21263.

Legend: n elements of a fragment; m rows and c columns of a matrix, r its rank here.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    blocks_of,
    check_length,
    check_lengths,
    check_magnitude,
    check_snapshot,
    magnitude,
)
from p2ptrain.codec.blockwise import BlockwiseCodec
from p2ptrain.codec.shapes import matrix_at, near_square

DEFAULT_RANK = 16
"""Default rank, which keeps 1/32 of the numbers of a 1024 x 1024 matrix. Guess: compare final losses by rank."""

FACTORS = BlockwiseCodec(bits=4, block_size=64)
"""Codec of the factors, 4.25 bits per number. Short blocks seldom span two components, whose sizes differ widely."""

LARGEST_ELEMENT = 2.0**100
"""Largest magnitude of a snapshot; products of its factors then stay within ``LARGEST_MAGNITUDE``."""

SMALLEST_LEFT, SMALLEST_RIGHT = 2.0**-24, 2.0**-100
"""Bounds below which numbers of P' and R' count as zero, so that no product is subnormal; P' has unit columns."""

COLD_ITERATIONS = 2
"""Iterations without a warm start: the first finds little, the second finds most (PowerSGD, section 4)."""


@dataclass(frozen=True, slots=True)
class _MatrixSlice:
    """The place of one matrix in a fragment."""

    offset: int
    """Index of the first element in the fragment."""
    rows: int
    columns: int
    rank: int
    """Rank of the factors; 0 if the elements are sent without factors."""

    @property
    def sizes(self) -> list[int]:
        """Number of numbers sent for each factor, padded to whole blocks."""
        counts = [self.rank * self.rows, self.rank * self.columns] if self.rank else [self.rows * self.columns]
        return [-(-count // FACTORS.block_size) * FACTORS.block_size for count in counts]


@dataclass(frozen=True, slots=True)
class LowRankCodec:
    """Codec with two thin factors per matrix.

    ``encode`` starts cold, ``encode_from`` from the last message's factor.
    """

    rank: int = DEFAULT_RANK
    """Largest rank of any matrix."""
    is_adaptive: bool = False
    """Whether the two sides agree on a rank of each message (``codec.negotiation``)."""
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")

    @property
    def name(self) -> str:
        return "lowrank"

    def encoded_size(self, terms: CodecTerms) -> int:
        return FACTORS.encoded_size(self._factor_terms(terms))

    def encode(self, snapshot: Tensor, terms: CodecTerms) -> bytes:
        return self.encode_from(snapshot, terms, None)[0]

    def encode_from(
        self,
        snapshot: Tensor,  # [n] fp32, host memory
        terms: CodecTerms,
        start: Tensor | None,  # [rank, columns of all matrices] fp32, from the last call; None starts cold
    ) -> tuple[bytes, Tensor]:
        """Return the message and the start for the next one, whose rank may differ.

        Raises ValueError like ``encode``.
        """
        check_snapshot(snapshot, terms)
        check_magnitude(magnitude(snapshot), LARGEST_ELEMENT)
        pieces = self._pieces(terms)
        starts = _random(self._rank(terms), sum(piece.columns for piece in pieces))
        if start is not None:
            starts[: len(start)] = start[: self._rank(terms)]
        numbers, column = [], 0
        for piece in pieces:
            values = matrix_at(snapshot, piece.offset, piece.rows, piece.columns)
            if piece.rank:
                first = starts[: piece.rank, column : column + piece.columns]
                left, right = factors(values, first, COLD_ITERATIONS if start is None else 1)
                numbers += [_filled(left.T), _filled(right)]
                first.copy_(_normal(right, first))
            else:
                numbers.append(_filled(values))
            column += piece.columns
        return FACTORS.encode(torch.cat(numbers), self._factor_terms(terms)), starts

    def decode(self, message: Buffer, terms: CodecTerms) -> Tensor:
        view = check_length(message, self.encoded_size(terms))
        numbers = FACTORS.decode(view, self._factor_terms(terms))
        result = torch.empty(terms.elements)
        for begin, end, part in self._parts(numbers, terms):
            result[begin:end] = part
        return result

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        own, other = (
            FACTORS.decode(view, self._factor_terms(terms))
            for view in check_lengths(mine, theirs, self.encoded_size(terms))
        )
        result = torch.empty(terms.elements)
        for (begin, end, part), (_, _, ours) in zip(self._parts(other, terms), self._parts(own, terms), strict=True):
            torch.sub(part, ours, out=result[begin:end])
        return result

    def _parts(self, numbers: Tensor, terms: CodecTerms) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (begin, end, elements) of a message, some rows at a time."""
        for piece in self._pieces(terms):
            sent, numbers = numbers[: sum(piece.sizes)], numbers[sum(piece.sizes) :]
            at_once = max(1, CHUNK // piece.columns)
            for first in range(0, piece.rows, at_once):
                past = min(piece.rows, first + at_once)
                rows = _rows(sent, piece, first, past)
                if not magnitude(rows) <= LARGEST_MAGNITUDE:  # False for NaN
                    limit = f"{LARGEST_MAGNITUDE:.3g}"
                    raise RemoteError(f"message multiplies to numbers that are not finite or beyond {limit}")
                begin = piece.offset + first * piece.columns
                end = min(begin + len(rows), terms.elements)
                yield begin, end, rows[: end - begin]

    def _pieces(self, terms: CodecTerms) -> list[_MatrixSlice]:
        pieces, offset = [], 0
        for rows, columns in terms.matrices or (near_square(terms.elements),):
            rank = min(self._rank(terms), rows, columns)
            gains = rank * (rows + columns) < rows * columns
            pieces.append(_MatrixSlice(offset, rows, columns, rank if gains else 0))
            offset += rows * columns
        return pieces

    def _rank(self, terms: CodecTerms) -> int:
        return min(terms.rank or self.rank, self.rank)

    def _factor_terms(self, terms: CodecTerms) -> CodecTerms:
        return CodecTerms(sum(sum(piece.sizes) for piece in self._pieces(terms)))


def factors(
    matrix: Tensor,  # [m, c] fp32
    start: Tensor,  # [r, c] fp32
    iterations: int,
) -> tuple[Tensor, Tensor]:
    """Factorize a matrix: [m, r] orthonormal columns after int4 rounding, and [r, c] their least-squares factor."""
    right = start
    for _ in range(iterations):
        left = torch.linalg.qr(matrix @ right.T).Q
        right = _normal(left.T @ matrix, start)
    left = _as_sent(left)
    gram = left.T @ left + 1e-6 * torch.eye(left.shape[1])  # int4 may round a column to zero
    return left, torch.linalg.solve(gram, left.T @ matrix)


def product(
    left: Tensor,  # [r, m] fp32, numbers of int4
    right: Tensor,  # [r, c] fp32, numbers of int4
) -> Tensor:
    """Add up the components in order, [m, c]: each product is exact, each sum rounded once."""
    result = left.new_zeros(left.shape[1], right.shape[1])
    for column, row in zip(left, right, strict=True):
        result.addcmul_(column[:, None], row[None, :])
    return result


def _rows(
    sent: Tensor,  # the numbers of one matrix
    piece: _MatrixSlice,
    first: int,
    past: int,
) -> Tensor:
    """Decode the rows [first, past) of a matrix, flat."""
    if not piece.rank:
        return sent[first * piece.columns : past * piece.columns]
    left, right = torch.split(sent, piece.sizes)
    left = left[: piece.rank * piece.rows].view(piece.rank, -1)[:, first:past]
    right = right[: piece.rank * piece.columns].view(piece.rank, -1)
    return product(
        torch.where(left.abs() < SMALLEST_LEFT, 0.0, left), torch.where(right.abs() < SMALLEST_RIGHT, 0.0, right)
    ).view(-1)


def _filled(values: Tensor) -> Tensor:
    """Flatten one factor and pad it with zeros to whole blocks, [k]."""
    return blocks_of(values.reshape(-1), FACTORS.block_size).view(-1)


def _as_sent(
    left: Tensor,  # [m, r] fp32
) -> Tensor:
    """Return the factor as the receiver will decode it, [m, r]."""
    numbers = _filled(left.T)
    terms = CodecTerms(len(numbers))
    read = FACTORS.decode(FACTORS.encode(numbers, terms), terms)
    return read[: left.numel()].view(left.shape[1], -1).T


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def _normal(
    right: Tensor,  # [r, c] fp32
    before: Tensor,  # [r, c] fp32
) -> Tensor:
    """Normalize the rows for the next iteration, [r, c]; a zero row is replaced with the row of ``before``."""
    norm = torch.linalg.vector_norm(right.double(), dim=1, keepdim=True)
    return torch.where(norm > 0, right / norm.clamp(min=1e-300), before).float()
