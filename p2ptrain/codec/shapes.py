"""The matrices inside a fragment, which is a slice of the flat vector of all parameters.

Legend: n elements of a fragment; m rows and c columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p2ptrain.codec.base import CodecTerms, Matrices


def near_square(elements: int) -> tuple[int, int]:
    """Return (rows, columns) that hold so many elements, with the largest 2^k columns that do not exceed the rows.

    With a power of two, the columns of most models' matrices, which lie one after the other, are aligned.
    """
    columns = 2 ** ((elements.bit_length() - 1) // 2)
    return -(-elements // columns), columns


def matrices(
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[int],
    begin: int,
    end: int,
) -> Matrices:
    """Return the matrices in the elements [begin, end) of a flat vector, for ``CodecTerms.matrices``.

    The whole rows of a parameter form a matrix; rows run along the first dimension. Vectors, gaps between parameters
    and rows cut by a boundary are matrices of one row.

    Args:
        shapes: shapes of the parameters in order, as in ``outer.FlatLayout``.
        offsets: first element of each parameter, ascending.
        begin: first element of the fragment.
        end: end of the fragment, exclusive.
    """
    found: list[tuple[int, int]] = []

    def add(rows: int, columns: int) -> None:
        if rows == 1 and found and found[-1][0] == 1:
            found[-1] = (1, found[-1][1] + columns)
        elif rows * columns > 0:
            found.append((rows, columns))

    place = begin
    for shape, offset in zip(shapes, offsets, strict=True):
        size = math.prod(shape)
        first, past = max(place, offset), min(end, offset + size)
        if first >= past:
            continue
        add(1, first - place)
        columns = size // shape[0] if len(shape) > 1 else size
        whole = min(past, offset - (offset - first) // columns * columns)
        add(1, whole - first)
        rows = (past - whole) // columns
        add(rows, columns)
        place = past
        add(1, past - whole - rows * columns)
    add(1, end - place)
    return tuple(found)


def weighted_ranks(
    vector: Tensor,  # [n] fp32
    terms: CodecTerms,
) -> tuple[float, int]:
    """Return the sum of the matrices' effective ranks, each times its elements, and the sum of these elements."""
    weighted, counted, offset = 0.0, 0, 0
    for rows, columns in terms.matrices or (near_square(terms.elements),):
        if min(rows, columns) > 1:
            matrix = matrix_at(vector, offset, rows, columns).double()
            gram = matrix @ matrix.T if rows < columns else matrix.T @ matrix
            singular = torch.linalg.eigvalsh(gram).clamp_(min=0.0).sqrt_()
            if float(singular.sum()) > 0:
                shares = singular / singular.sum()
                weighted += rows * columns * math.exp(float(torch.special.entr(shares).sum()))
                counted += rows * columns
        offset += rows * columns
    return weighted, counted


def matrix_at(
    fragment: Tensor,  # [n]
    offset: int,
    rows: int,
    columns: int,
) -> Tensor:
    """Return the matrix at an offset, [m, c]; copied only if it exceeds the fragment and is padded with zeros."""
    values = fragment[offset : offset + rows * columns]
    missing = rows * columns - len(values)
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(rows, columns)
