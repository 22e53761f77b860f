"""Fragments: the fixed slices of the parameters that peers exchange.

Legend: P parameters in the flat vector (padding included), F fragments.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from p2ptrain.base.codec_names import FRAGMENT_ALIGNMENT
from p2ptrain.base.errors import ManifestError


def slices(parameter_count: int, fragments: int, align: int = FRAGMENT_ALIGNMENT) -> tuple[slice, ...]:
    """Cut ``[0, P)`` into F contiguous slices whose inner boundaries are multiples of ``align``.

    The lengths differ by at most one block of ``align`` elements (the last slice also ends wherever P does). A pure
    function of its arguments, so that all peers of a run cut alike.

    Raises:
        ManifestError: more fragments than blocks, so that a fragment would be empty.
        ValueError: an argument is less than 1.
    """
    if parameter_count < 1 or fragments < 1 or align < 1:
        raise ValueError(f"slices({parameter_count=}, {fragments=}, {align=}): all three must be at least 1")
    blocks = -(-parameter_count // align)
    if fragments > blocks:
        raise ManifestError(
            f"{fragments} fragments are too many for {parameter_count} parameters, cut at multiples of {align}.",
            f"Set the number of fragments in the manifest to at most {blocks}.",
        )
    bounds = [min(parameter_count, align * (i * blocks // fragments)) for i in range(fragments + 1)]
    return tuple(slice(begin, end) for begin, end in itertools.pairwise(bounds))


def layer_slices(units: Sequence[int], fragments: int, align: int = FRAGMENT_ALIGNMENT) -> tuple[slice, ...]:
    """Cut units that lie end to end into F contiguous slices: runs of whole units, and equal parts of long units.

    The longest slice is as short as these two kinds allow, up to rounding; the others are of about equal length. A pure
    function of its arguments.

    Args:
        units: elements of each unit, such as the embedding and each block of a model.
        fragments: F.
        align: parts of one unit begin at multiples of this within the unit.

    Raises:
        ManifestError: more fragments than parts.
        ValueError: an argument is less than 1.
    """
    if not units or min(units) < 1 or fragments < 1 or align < 1:
        raise ValueError(f"layer_slices({units=}, {fragments=}, {align=}): all must be at least 1")
    parts = [-(-unit // align) for unit in units]  # most slices of each unit
    room = [*itertools.accumulate(reversed(parts), initial=0)][::-1]  # most slices of the units from each one on
    if fragments > room[0]:
        raise ManifestError(
            f'{fragments} fragments are too many for outer.cut = "layers": this model has {room[0]} parts.',
            f"Set outer.fragments in the manifest to at most {room[0]}.",
        )
    starts = [*itertools.accumulate(units, initial=0)]
    lengths = range(align, max(align, starts[-1]) + 1)
    limit = lengths[bisect_left(lengths, True, key=lambda limit: _fewest(units, limit, align)[0] <= fragments)]
    fewest = _fewest(units, limit, align)

    def is_possible(end: int, left: int) -> bool:
        return fewest[end] <= left <= room[end]

    bounds, unit, left = [0], 0, fragments
    while left:
        goal = (starts[-1] - starts[unit]) / left
        runs = range(unit + 1, bisect_right(starts, starts[unit] + limit))
        choices = [(abs(starts[end] - starts[unit] - goal), end, 1) for end in runs if is_possible(end, left - 1)]
        least = max(2, left - room[unit + 1], -(-parts[unit] // (limit // align)) if units[unit] > limit else 1)
        most = min(parts[unit], left - fewest[unit + 1])
        if least <= most:
            cuts = {min(max(count, least), most) for count in (int(units[unit] / goal), int(units[unit] / goal) + 1)}
            choices += [(abs(units[unit] / count - goal), unit + 1, count) for count in sorted(cuts)]
        _, end, count = min(choices)
        inside = slices(units[unit], count, align) if count > 1 else ()
        bounds += [*(starts[unit] + piece.start for piece in inside[1:]), starts[end]]
        unit, left = end, left - count
    return tuple(slice(begin, end) for begin, end in itertools.pairwise(bounds))


def _fewest(units: Sequence[int], limit: int, align: int) -> list[int]:
    """Return the fewest slices of at most ``limit`` elements for the units from each one to the end."""
    fewest = [0] * (len(units) + 1)
    end, run = len(units), 0  # the run [unit, end) of units that fit into one slice together
    for unit in reversed(range(len(units))):
        run += units[unit]
        if units[unit] > limit:
            blocks = -(-units[unit] // align)
            fewest[unit] = -(-blocks // (limit // align)) + fewest[unit + 1]
            end, run = unit, 0
            continue
        while run > limit:
            end -= 1
            run -= units[end]
        fewest[unit] = 1 + fewest[end]
    return fewest
