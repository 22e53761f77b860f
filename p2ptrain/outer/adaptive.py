"""Adaptive compression of DiLoCoX: the message rank and H, both derived from the pseudo-gradients.

::

    q = the mean of the last c effective ranks r' / the mean of the first c
    r_t = r_1 q, rounded up, 1 <= r_t <= r_1        H_t = H_1 r_t / r_1, rounded

Here r' is the effective rank of the averages that have arrived. Where all peers average at once, these are equal, so
that all compute the same r_t and H_t without a message. Peers that average in pairs have averages, ranks and H of their
own, and two partners use the smaller of both ranks. The size of a low-rank message is proportional to its rank: fewer
bytes per outer step pay for more frequent outer steps, and the bytes per inner step stay the same.

Source: DiLoCoX (arXiv 2506.21263). Only its abstract was available; it names an adaptive compression and prints no
rule. The rule is our interpretation: that both follow a window of ranks; r' as the exponential of the entropy of the
singular values (``codec.weighted_ranks``); that r_1 fits the first window; H in proportion to r; how both are rounded.

Setting r_t = r' itself would shrink the rank at every step, because an average of messages of rank r_t has an effective
rank below r_t where messages agree; a ratio of two windows does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RANK_WINDOW = 5
"""c, in outer steps: short compared with a run, long compared with the noise of one average. Guess: measure the noise
of r'."""

SMALLEST_RANK = 1
"""Minimum rank, the least that a message can have. The maximum is the run's own rank, r_1, which the run was tuned
with. Guess: compare final losses with other minimums."""


def rank_and_inner_steps(
    effective_ranks: Sequence[float],
    first_rank: int,
    first_inner_steps: int,
) -> tuple[int, int]:
    """Return r_t and H_t of the next outer step, ``SMALLEST_RANK`` <= r_t <= r_1 and 1 <= H_t <= H_1.

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


class AdaptiveRank:
    """Rank and H of one peer that averages in pairs.

    Args:
        first_rank: r_1 >= 1.
        first_inner_steps: H_1 >= 1.
    """

    def __init__(self, first_rank: int, first_inner_steps: int) -> None:
        self._first = first_rank, first_inner_steps
        self.effective_ranks: list[float] = []
        """r' of the first and of the last ``RANK_WINDOW`` averages."""

    @property
    def rank(self) -> int:
        """r of the next messages."""
        return rank_and_inner_steps(self.effective_ranks, *self._first)[0]

    @property
    def inner_steps(self) -> int:
        """H of the phase that begins."""
        return rank_and_inner_steps(self.effective_ranks, *self._first)[1]

    def follow(self, effective_rank: float) -> None:
        """Take the effective rank of the average that an outer step used."""
        self.effective_ranks.append(effective_rank)
        if len(self.effective_ranks) > 2 * RANK_WINDOW:
            del self.effective_ranks[RANK_WINDOW]

    def resume(self, effective_ranks: Sequence[float]) -> None:
        """Restore ``effective_ranks``. Raises ValueError if they are out of range."""
        rank_and_inner_steps(effective_ranks, *self._first)
        self.effective_ranks = list(effective_ranks[: 2 * RANK_WINDOW])
