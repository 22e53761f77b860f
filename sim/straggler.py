"""Inner steps before an outer step for peers with slow connections, if peers wait for each other.

A blocking recipe is as slow as its last peer. GASLoC (arXiv 2606.11081) lets a peer with a slow connection train less
instead, so that its phase and its exchange together take as long as those of the others::

    H_i t + k s / f  =  H t + k s          hence          H_i = H - k (s / t) (1 / f - 1)

with t seconds per inner step, s seconds per exchange with one partner at full bandwidth, k partners, and f the share of
that bandwidth that the peer has. The formula is inferred, not printed: with s / t = 5 / 3 and H = 30 it yields the 15
(one partner) and 1 (two) that the paper reports at f = 10 %.
"""

from __future__ import annotations

import math


def straggler_inner_steps(
    inner_steps: int,
    partners: int,
    exchange_steps: float,
    bandwidth_share: float,
) -> int:
    """Return the inner steps H_i >= 1 of a peer with a slow connection.

    Args:
        inner_steps: H >= 1 of the peers with full bandwidth, which is also the maximum returned.
        partners: k >= 0, exchanges that the peer waits for in one outer step.
        exchange_steps: s / t, duration of one exchange at full bandwidth in inner steps.
        bandwidth_share: f, 0 < f <= 1.

    Raises:
        ValueError: a number is out of range.
    """
    if not (inner_steps >= 1 and partners >= 0 and 0 <= exchange_steps < math.inf and 0 < bandwidth_share <= 1):
        raise ValueError(
            f"inner_steps {inner_steps}, partners {partners}, exchange_steps {exchange_steps} or bandwidth_share "
            f"{bandwidth_share} is out of range"
        )
    late = partners * exchange_steps * (1.0 / bandwidth_share - 1.0)
    return max(1, math.floor(inner_steps - late + 0.5))
