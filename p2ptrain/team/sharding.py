"""Which rank of a team owns which fragments: contiguous runs in the order of the stages.

Legend: F fragments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.base.errors import DeviceError
from p2ptrain.outer.fragments import stage_starts


@dataclass(frozen=True, slots=True)
class Sharding:
    """Owners of the fragments."""

    fragments: tuple[slice, ...]
    """Slices of the whole flat vector."""
    starts: tuple[int, ...]
    """First fragment of each rank, then F."""

    @property
    def ranks(self) -> int:
        return len(self.starts) - 1

    def place(self, number: int) -> tuple[int, int]:
        """Return the owner of a network number, and the number that it has in the owner's ``Payloads``."""
        kind, fragment = divmod(number, len(self.fragments))
        rank = bisect_right(self.starts, fragment) - 1
        first, end = self.starts[rank : rank + 2]
        return rank, kind * (end - first) + fragment - first

    def numbers(self, rank: int) -> range:
        """Return the fragments of a rank."""
        return range(*self.starts[rank : rank + 2])

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Return the fragments of a rank as slices of its own flat vector."""
        own = [self.fragments[number] for number in self.numbers(rank)]
        return tuple(slice(piece.start - own[0].start, piece.stop - own[0].start) for piece in own)


def sharding_of(fragments: Sequence[slice], offsets: Sequence[int], units: Sequence[int] = ()) -> Sharding:
    """Return the owners of fragments, slices of the whole flat vector that cover it in order.

    Args:
        offsets: where each rank's vector begins in the whole one.
        units: elements of each unit of the model, to say where ranks may begin.

    Raises DeviceError if a rank's vector begins in the middle of a fragment.
    """
    begins = [piece.start for piece in fragments]
    if not set(offsets) <= set(begins):
        if len(cuts := stage_starts(units, fragments)) > 1:
            raise DeviceError(
                "A device begins in the middle of a fragment.",
                f"Let devices begin with one of the layers {', '.join(map(str, cuts))}, counted from the embedding, 0.",
            )
        raise DeviceError(
            "This run cuts its weights within layers, so some fragments would lie on two devices.",
            'Use one device; the author of a run can allow several with outer.cut = "layers".',
        )
    starts = [*(begins.index(offset) for offset in offsets), len(fragments)]
    if starts[0] != 0 or any(end <= start for start, end in pairwise(starts)):
        raise ValueError(f"ranks at {list(offsets)} do not own fragments in order")
    return Sharding(tuple(fragments), tuple(starts))
