"""Fragments: the fixed slices of the parameters that peers exchange.

Legend: P parameters in the flat vector (padding included), F fragments.
"""

from __future__ import annotations

import itertools

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
