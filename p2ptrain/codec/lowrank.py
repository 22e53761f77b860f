"""``lowrank``: each matrix as the product of two thin factors, quantized to int4. For pseudo-gradients.

Only with error feedback (``codec.feedback``), which also carries the power iteration from one message to the next. One
iteration a message, from the factor R of the last one::

    P = orthonormal(M R^T)       sent as int4, read back as P'
    R = least squares of M ~ P' R, sent as int4         M ~ P' R'

The fit against P' as the others will read it makes up for the rounding of P. A matrix too small to gain by it is sent
as plain int4. Power iteration with a warm start: PowerSGD, Vogels et al., arXiv 1905.13727; low rank and then int4 on
pseudo-gradients: DiLoCoX, arXiv 2506.21263.

Message: what ``int4`` makes of all factors one after the other, each filled up to whole blocks; for each matrix P by
columns, then R by rows, so that a scale nearly always belongs to one component. To read it, the components are added
one by one: a product of two int4 numbers is exact in fp32, so the sum is the same to the bit on any machine, which a
matrix product is not.

What the matrices of a fragment are, ``terms.matrices`` says. If it says nothing, the fragment is one matrix of 2^k
columns, close to square, filled up with zeros.

Legend: n elements of a fragment; m rows and c columns of a matrix, r its rank here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
"""A guess: on 1024 x 1024 it is a 32nd of the numbers."""

FACTORS = BlockwiseCodec(bits=4, block_size=64)
"""4.25 bits a number. Blocks this short seldom straddle two components, whose sizes differ widely."""

LARGEST_ELEMENT = 2.0**100
"""No element of a snapshot may be larger: what its factors multiply to then stays within ``LARGEST_MAGNITUDE``."""

SMALLEST_LEFT, SMALLEST_RIGHT = 2.0**-24, 2.0**-100
"""Smaller numbers of P' and R' count as zero, so that no product is subnormal; P' has columns of norm 1."""

COLD_ITERATIONS = 2
"""Without a warm start, one iteration from a random factor finds little; a second finds most. PowerSGD, section 4."""


@dataclass(frozen=True, slots=True)
class _MatrixSlice:
    """One matrix of a fragment."""

    offset: int
    """Its first element in the fragment."""
    rows: int
    columns: int
    rank: int
    """0: its elements are sent as they are."""

    @property
    def sizes(self) -> list[int]:
        """How many numbers are sent of it, factor by factor, each filled up to whole blocks."""
        counts = [self.rank * self.rows, self.rank * self.columns] if self.rank else [self.rows * self.columns]
        return [-(-count // FACTORS.block_size) * FACTORS.block_size for count in counts]


@dataclass(frozen=True, slots=True)
class LowRankCodec:
    """Sends two thin factors of each matrix. ``encode`` starts cold; ``encode_from`` where the last message ended."""

    rank: int = DEFAULT_RANK
    """The largest rank of any matrix. A rank that follows ``effective_rank`` is another codec each time."""

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
        start: Tensor | None,  # [rank, columns of all matrices] fp32: what the last call returned; None starts cold
    ) -> tuple[bytes, Tensor]:
        """The message, and the start for the next one, which may have another rank. Raises ValueError as ``encode``."""
        check_snapshot(snapshot, terms)
        check_magnitude(magnitude(snapshot), LARGEST_ELEMENT)
        pieces = self._pieces(terms)
        starts = _random(self.rank, sum(piece.columns for piece in pieces))
        if start is not None:
            starts[: len(start)] = start[: self.rank]
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
        """(begin, end, elements) of a message, a few rows at a time."""
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
            rank = min(self.rank, rows, columns)
            gains = rank * (rows + columns) < rows * columns
            pieces.append(_MatrixSlice(offset, rows, columns, rank if gains else 0))
            offset += rows * columns
        return pieces

    def _factor_terms(self, terms: CodecTerms) -> CodecTerms:
        return CodecTerms(sum(sum(piece.sizes) for piece in self._pieces(terms)))


def factors(
    matrix: Tensor,  # [m, c] fp32
    start: Tensor,  # [r, c] fp32
    iterations: int,
) -> tuple[Tensor, Tensor]:
    """[m, r] and [r, c]: orthonormal columns as int4 carries them, and the best factor beside them."""
    right = start
    for _ in range(iterations):
        left = torch.linalg.qr(matrix @ right.T).Q
        right = _normal(left.T @ matrix, start)
    left = _as_sent(left)
    gram = left.T @ left + 1e-6 * torch.eye(left.shape[1])  # so that a column that int4 emptied does no harm
    return left, torch.linalg.solve(gram, left.T @ matrix)


def product(
    left: Tensor,  # [r, m] fp32, numbers of int4
    right: Tensor,  # [r, c] fp32, numbers of int4
) -> Tensor:
    """[m, c] the sum of the components, one after the other: each product is exact, each sum rounded once."""
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
    """[(past - first) c] some rows of it."""
    if not piece.rank:
        return sent[first * piece.columns : past * piece.columns]
    left, right = torch.split(sent, piece.sizes)
    left = left[: piece.rank * piece.rows].view(piece.rank, -1)[:, first:past]
    right = right[: piece.rank * piece.columns].view(piece.rank, -1)
    return product(
        torch.where(left.abs() < SMALLEST_LEFT, 0.0, left), torch.where(right.abs() < SMALLEST_RIGHT, 0.0, right)
    ).view(-1)


def _filled(values: Tensor) -> Tensor:
    """[k] the numbers of one factor, filled up with zeros to whole blocks."""
    return blocks_of(values.reshape(-1), FACTORS.block_size).view(-1)


def _as_sent(
    left: Tensor,  # [m, r] fp32
) -> Tensor:
    """[m, r] what the others will read of it."""
    numbers = _filled(left.T)
    terms = CodecTerms(len(numbers))
    read = FACTORS.decode(FACTORS.encode(numbers, terms), terms)
    return read[: left.numel()].view(left.shape[1], -1).T


def _random(rows: int, columns: int) -> Tensor:
    """[rows, columns] fp32 normally distributed, always the same."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def _normal(
    right: Tensor,  # [r, c] fp32
    before: Tensor,  # [r, c] fp32
) -> Tensor:
    """[r, c] rows of norm 1, to begin the next iteration from; the row of before where nothing was found."""
    norm = torch.linalg.vector_norm(right.double(), dim=1, keepdim=True)
    return torch.where(norm > 0, right / norm.clamp(min=1e-300), before).float()
