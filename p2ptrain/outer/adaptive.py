"""The rank of what is sent, and H with it, where both follow the pseudo-gradients: DiLoCoX's adaptive compression.

::

    q = the mean of the last c effective ranks r' / the mean of the first c
    r_t = r_1 q, rounded up, 1 <= r_t <= r_1        H_t = H_1 r_t / r_1, rounded

with r' of the averages that have arrived, the same for all peers, so that all come to the same r_t and H_t without a
message. What a low-rank message costs is proportional to its rank: fewer bytes an outer step pay for outer steps more
often, and the bytes of an inner step stay what they were.

Source: DiLoCoX (arXiv 2506.21263). Only its abstract was at hand: it names an adaptive compression and prints no rule.
The rule is our reading: that both follow a window of ranks; r' as the exponential of the entropy of the singular values
(``codec.effective_rank``); that the first window is what r_1 was right for; H in proportion to r; how both are rounded.

Why not r_t = r' itself: the average of N messages of rank r has up to N r components, and r' is far above r; where
peers send much the same, r' is always a little below r, and r would sink by that alone. Both were seen
(docs/ALGORITHMS.md). A ratio of two windows is free of either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RANK_WINDOW = 5
"""c, in outer steps. Our guess: short beside a run, long beside the noise of one average."""

SMALLEST_RANK = 1
"""Our guess: one component is the least that a message can have. The largest is the run's own rank, r_1: what it was
tuned with, and what its lines were chosen for."""


def rank_and_inner_steps(
    effective_ranks: Sequence[float],
    first_rank: int,
    first_inner_steps: int,
) -> tuple[int, int]:
    """r_t and H_t of the next outer step: ``SMALLEST_RANK`` <= r_t <= r_1 and 1 <= H_t <= H_1.

    Args:
        effective_ranks: r' >= 0 of all averages that have arrived, in order.
        first_rank: r_1 >= 1.
        first_inner_steps: H_1 >= 1.

    Raises:
        ValueError: a number is out of range.
    """
    first, last = math.fsum(effective_ranks[:RANK_WINDOW]), math.fsum(effective_ranks[-RANK_WINDOW:])
    known = [*effective_ranks[:RANK_WINDOW], *effective_ranks[-RANK_WINDOW:]]
    if not (first_rank >= 1 and first_inner_steps >= 1 and all(0 <= each < math.inf for each in known)):
        raise ValueError(
            f"effective_ranks {known}, first_rank {first_rank} or first_inner_steps {first_inner_steps} is out of range"
        )
    if len(effective_ranks) < RANK_WINDOW or last >= first:
        return first_rank, first_inner_steps
    rank = max(SMALLEST_RANK, math.ceil(first_rank * last / first))
    halves_up = (2 * first_inner_steps * rank + first_rank) // (2 * first_rank)
    return rank, max(1, halves_up)


__all__ = ["RANK_WINDOW", "SMALLEST_RANK", "rank_and_inner_steps"]
