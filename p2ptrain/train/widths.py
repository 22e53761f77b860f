"""Step widths of the modular codecs: what one peer learns of them, and which exchanges do not fit what was agreed.

A modular message says only where each weight is modulo so many steps, and the steps are as wide as two sketches say
that both sides are apart. Sketches are linear: from the sketches' difference t, what the messages yield, d, can be
taken away, and ||t - d|| is what the messages lost, or say beyond what was told. Both sides have both messages and both
sketches and find the same numbers; what they make of them may differ, as each knows how often its widths have fitted.
Where one refuses and the other would mix, neither does: who refuses acknowledges nothing.

======== =============================== =======================================
verdict  the honest reason for it        what it teaches
======== =============================== =======================================
FITS     widths are right, or unknown    what was measured
WIDE     widths are too wide             what was measured, where it is narrower
NARROW   widths are too narrow           what was measured, where it is wider
======== =============================== =======================================

Only what fits is mixed. A lie looks like WIDE or NARROW as well, and an exchange that fits can hide a lie about some
blocks: so every exchange teaches, and none teaches more than ``steps.PACE``. One honest exchange takes back what one
lie taught, in either direction, whatever was judged; liars need half of a peer's exchanges.

Codecs without steps have no sketches either: nothing is told, nothing is left, and everything fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from p2ptrain.codec import FIRST_PACE, PACE, Codec, CodecTerms, Comparison, first_shape, next_shape

GAP = 1.2
"""The largest ||t - d|| / ||t|| of weights that are where the sketch said, wrapped blocks or not; these count as zero.
Our measurement, transformers through four bits: .2 to .6 between honest peers in step, up to .8 beside liars; up to 1.1
in the first seconds of tiny ones, whose blocks wrap while their widths are unknown. Weights that were negated, or three
times too large, left 1.28 and more wherever fewer than half of the blocks wrapped (docs/SECURITY.md)."""

LEAST_GAP = 1e-3
"""Of our own weights' length: so much may be left in any case. Sketches are sums in fp32, and weights that lie nearer
than this are as good as equal."""

MISFIT_SHARE = 0.5
"""Of the blocks of an exchange, how many may wrap. Our measurement: of a transformer's 121 blocks .26 at the most
between honest peers, late, slow and frozen ones among them, once one exchange was made (.91 in the first); of bytes
that stand for no weights, all (docs/SECURITY.md)."""

MISFIT_BLOCKS = 16
"""With fewer blocks, as many may wrap by chance. A guess."""

FITTED = 3
"""Exchanges of one number that fitted before its widths count as known. In a young swarm they change as quickly as the
weights: of three tiny peers every third was left alone for widths that had fitted once."""


class WidthFeedback(Enum):
    """What one exchange says of the widths that it used."""

    FITS = auto()
    WIDE = auto()
    """The messages leave more than was told: widths far too wide make honest ones do so."""
    NARROW = auto()
    """Most blocks wrapped. Bytes that stand for no weights wrap as well; they would count as no difference, which no
    gate for distances stops. It is no offence: widths are learnt from one exchange for the next."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How well the messages of one exchange say where one fragment is."""

    told: float
    """||t||: how far apart both sides' sketches say they are."""
    left: float
    """||t - d||: what the messages leave unexplained of it."""
    blocks: int
    wrapped: float
    """The share of blocks that wrapped."""


class Widths:
    """Which step widths each number of the network's needs, for codecs that agree on them."""

    def __init__(self) -> None:
        self._shapes: dict[int, bytes] = {}
        self._guesses: dict[int, bytes] = {}
        """Wished for where nothing is known; the first exchange teaches what differs from them."""
        self._fitted: Counter[int] = Counter()
        """By the network's number, exchanges whose widths fitted, since our weights are what they are."""

    @property
    def are_unknown(self) -> bool:
        """Nothing was measured or foreseen yet."""
        return not self._shapes

    def foresee(
        self,
        codecs: Mapping[int, Codec],
        movements: Mapping[int, Tensor],  # [n] each
    ) -> None:
        """Before anything was measured: as if differences were spread as these movements are."""
        self._shapes = {number: first_shape(codecs[number], moved) for number, moved in movements.items()}

    def shape(
        self,
        number: int,
        codec: Codec,
        values: Tensor,  # [n]
    ) -> bytes:
        """To wish for; where nothing is known, as these values are spread."""
        if known := self._shapes.get(number):
            return known
        self._guesses[number] = first_shape(codec, values)
        return self._guesses[number]

    def judge(self, numbers: Sequence[int], fits: Sequence[Fit], own: float) -> WidthFeedback:
        """Whether an exchange may be mixed, all its fragments together.

        Args:
            own: length of our own weights in these fragments.
        """
        told, left = math.hypot(*(fit.told for fit in fits)), math.hypot(*(fit.left for fit in fits))
        equal = LEAST_GAP * own
        if not left <= max(GAP * told, equal):  # NaN is no place either
            return WidthFeedback.WIDE
        if told <= equal:  # what wraps there is lost, and nothing is missed
            return WidthFeedback.FITS
        known = [fit for number, fit in zip(numbers, fits, strict=True) if self._fitted[number] >= FITTED]
        blocks = sum(fit.blocks for fit in known)
        if blocks >= MISFIT_BLOCKS and sum(fit.wrapped * fit.blocks for fit in known) > MISFIT_SHARE * blocks:
            return WidthFeedback.NARROW
        return WidthFeedback.FITS

    def learn(
        self, number: int, codec: Codec, terms: CodecTerms, found: Comparison, fit: Fit, verdict: WidthFeedback
    ) -> None:
        """What was measured of this number helps the next exchange, whatever becomes of this one."""
        before = self._shapes.get(number) or self._guesses.get(number)
        if not before or not fit.told > 0:  # equal weights fit any widths
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

    def begin_anew(self) -> None:
        """Our weights were replaced: widths that fitted need not."""
        self._fitted.clear()
