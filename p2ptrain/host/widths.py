"""Step widths of the modular codecs: what a peer learns about them, and which exchanges do not fit the agreed ones.

A modular message states each weight only modulo some number of steps, and two sketches determine the step width from
the distance of both sides. Sketches are linear: subtracting the messages' difference d from the sketches' difference t
leaves ||t - d||, what the messages lost or contain beyond the sketches. Both sides have both messages and both sketches
and compute the same numbers, but they may judge differently, because each knows how often its own widths have fitted.
If one side refuses, neither mixes: a refusing side acknowledges nothing.

======== =============================== =======================================
verdict  the honest reason for it        what it teaches
======== =============================== =======================================
FITS     widths are right, or unknown    what was measured
WIDE     widths are too wide             what was measured, where it is narrower
NARROW   widths are too narrow           what was measured, where it is wider
======== =============================== =======================================

Only exchanges that fit are mixed. A dishonest payload also looks like WIDE or NARROW, and an exchange that fits can
hide dishonest blocks, so every exchange teaches, and none more than ``steps.PACE``. One honest exchange undoes what one
dishonest exchange taught, in either direction and for any verdict; adversarial peers would need half of a peer's
exchanges.

Codecs without steps have no sketches: all numbers are zero, and everything fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from p2ptrain.codec import FIRST_PACE, PACE, Codec, CodecTerms, Comparison, first_shape, next_shape

GAP = 1.2
"""Largest ||t - d|| / ||t|| of weights that match their sketch, whether or not blocks wrapped; wrapped blocks count as
zero. Measured on transformers with four bits: .2 to .6 between honest peers in step, up to .8 beside adversarial peers;
up to 1.1 in the first seconds of tiny ones, whose blocks wrap while their widths are unknown. Negated weights, or
weights three times too large, left 1.28 and more if fewer than half of the blocks wrapped (docs/SECURITY.md)."""

LEAST_GAP = 1e-3
"""Tolerated remainder as a share of this peer's own norm. Sketches are sums in fp32, and weights nearer than this are
practically equal."""

MISFIT_SHARE = 0.5
"""Largest share of an exchange's blocks that may wrap. Measured on a transformer's 121 blocks: at most .26 between
honest peers, including late, slow and frozen ones, after the first exchange (.91 in the first); all of them for bytes
that are not weights (docs/SECURITY.md)."""

MISFIT_BLOCKS = 16
"""Minimum number of blocks for a verdict; with fewer, as many may wrap by chance. Guess: wrap counts of small models
would settle it."""

FITTED = 3
"""Fitting exchanges of one number after which its widths count as known. In a young swarm they change as quickly as the
weights: with a threshold of one, three tiny peers refused every third exchange."""


class WidthFeedback(Enum):
    """Feedback of one exchange on the widths that it used."""

    FITS = auto()
    WIDE = auto()
    """The messages differ from the sketches by too much: widths far too wide cause that between honest peers."""
    NARROW = auto()
    """Most blocks wrapped. Bytes that are not weights wrap too; they would count as no difference, which no limit on
    distances stops. Not an offence: widths for the next exchange are learnt from this one."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Agreement of one exchange's messages and sketches for one fragment."""

    sketched: float
    """||t||: distance of both sides according to their sketches."""
    unexplained: float
    """||t - d||: part of it that the messages do not explain."""
    blocks: int
    wrapped: float
    is_known: bool = False
    """Whether widths of this fragment have fitted often enough to be known."""


class Widths:
    """Step widths of each network number, for codecs that negotiate them."""

    def __init__(self) -> None:
        self._shapes: dict[int, bytes] = {}
        self._guesses: dict[int, bytes] = {}
        """Proposals for unknown widths; the first exchange learns relative to them."""
        self._fitted: Counter[int] = Counter()
        """Exchanges whose widths fitted since this peer's weights were last replaced, by network number."""

    @property
    def are_unknown(self) -> bool:
        return not self._shapes

    def predict_widths(
        self,
        movements: Iterable[tuple[int, Codec, Tensor]],  # network number, its codec, [n]
    ) -> None:
        """Set widths before any measurement, as if differences were distributed like these movements."""
        self._shapes = {number: first_shape(codec, moved) for number, codec, moved in movements}

    def shape(
        self,
        number: int,
        codec: Codec,
        values: Tensor,  # [n]
    ) -> bytes:
        """Return the widths to propose; unknown ones follow the distribution of these values."""
        if known := self._shapes.get(number):
            return known
        self._guesses[number] = first_shape(codec, values)
        return self._guesses[number]

    def fit(
        self,
        number: int,
        sketch: Tensor,  # [64] of the difference, or [0]
        gap: Tensor,  # the same without what the messages explain
        found: Comparison,
    ) -> Fit:
        """Return how a message and its sketch agree."""
        is_known = self._fitted[number] >= FITTED
        return Fit(float(sketch.norm()), float(gap.norm()), len(found.fill), found.wrapped, is_known)

    def learn(
        self, number: int, codec: Codec, terms: CodecTerms, found: Comparison, fit: Fit, verdict: WidthFeedback
    ) -> None:
        """Learn from the measurements of this number for the next exchange, whether or not this one is mixed."""
        before = self._shapes.get(number) or self._guesses.get(number)
        if not before or not fit.sketched > 0:  # equal weights fit any widths
            return
        after = next_shape(codec, before, terms, found, PACE if self._fitted[number] >= FITTED else FIRST_PACE)
        match verdict:
            case WidthFeedback.WIDE:
                after = bytes(map(min, before, after))
            case WidthFeedback.NARROW:
                after = bytes(map(max, before, after))
            case WidthFeedback.FITS if fit.wrapped <= MISFIT_SHARE:
                self._fitted[number] += 1
        self._shapes[number] = after

    def forget_fits(self) -> None:
        """Forget which widths fitted, because this peer's weights were replaced."""
        self._fitted.clear()


def judge(fits: Sequence[Fit], own: float) -> WidthFeedback:
    """Return whether an exchange may be mixed, all fragments together; ``own`` is the norm of our weights there."""
    sketched = math.hypot(*(fit.sketched for fit in fits))
    unexplained = math.hypot(*(fit.unexplained for fit in fits))
    equal = LEAST_GAP * own
    if not unexplained <= max(GAP * sketched, equal):  # also true for NaN
        return WidthFeedback.WIDE
    if sketched <= equal:  # wrapped blocks are lost, but nothing is missing
        return WidthFeedback.FITS
    known = [fit for fit in fits if fit.is_known]
    blocks = sum(fit.blocks for fit in known)
    if blocks >= MISFIT_BLOCKS and sum(fit.wrapped * fit.blocks for fit in known) > MISFIT_SHARE * blocks:
        return WidthFeedback.NARROW
    return WidthFeedback.FITS
