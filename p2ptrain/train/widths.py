"""Step widths of the modular codecs: what one peer learns of them, and which exchanges do not fit what was agreed.

A modular message says only where each weight is modulo so many steps, and the steps are as wide as two sketches say
that both sides are apart. Sketches are linear: from the sketches' difference t, what the messages yield, d, can be
taken away, and ||t - d|| is what the messages lost, or say beyond what was told. Both sides have both messages and both
sketches, and find the same.

Codecs without steps have no sketches either: nothing is told, nothing is left, and everything fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from p2ptrain.codec import Codec, CodecTerms, Comparison, first_shape, next_shape
from p2ptrain.errors import NetworkError

ELSEWHERE = "its weights are not where it said they are"

NEARER = 0.9
"""The largest ||t - d|| / ||t|| worth mixing. A share a of d leaves ||t - a d|| <= (1 - a (1 - that)) ||t||: nearer for
certain below 1. Our measurement, transformers through four bits: .2 to .6 between honest peers, .82 at the most in 350
exchanges, the first ones included; 1 where all blocks wrapped, since these count as zero. A sketch errs by 9 %."""

GAP = 1.1
"""More than this, and the weights are not those that were sketched, whatever wrapped: negated, scaled, of another size.
Between both bounds the widths may be too narrow, or the bytes stand for no weights."""

LEAST_GAP = 1e-3
"""Of our own weights' length: so much may be left in any case. Sketches are sums in fp32, and weights that lie nearer
than this are as good as equal."""

MISFITS = 3
"""In a row, and it is our widths that are too narrow. Two were often two liars among eight."""

STRAYS = 9
"""In a row, and it is our widths that are too wide, though nobody should be able to teach us these. A guess."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Of one fragment in one exchange."""

    told: float
    """||t||: how far apart both sides' sketches say they are."""
    left: float
    """||t - d||: what the messages leave unexplained of it."""


class Widths:
    """Which step widths each number of the network's needs, for codecs that agree on them."""

    def __init__(self) -> None:
        self._shapes: dict[int, bytes] = {}
        self._fitted: set[int] = set()
        """Numbers whose widths fitted once, since our weights are what they are."""
        self._misfits = 0
        self._strays = 0

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
        return self._shapes.get(number) or first_shape(codec, values)

    def check(self, fragments: Sequence[int], gaps: Sequence[Gap], own: float) -> None:
        """Raises NetworkError where an exchange must be neither mixed nor learnt from.

        Args:
            own: length of our own weights in these fragments.
        """
        self._check_place(gaps, own)
        self._check_fit([number in self._fitted for number in fragments], gaps, own)

    def learn(self, number: int, codec: Codec, terms: CodecTerms, found: Comparison, gap: Gap, own: float) -> None:
        """What was measured helps the next exchange, whatever becomes of this one."""
        if not terms.shape:
            return
        self._shapes[number] = next_shape(codec, self._shapes.get(number, terms.shape), terms, found)
        if _fits([gap], NEARER, own):
            self._fitted.add(number)

    def begin_anew(self) -> None:
        """Our weights were replaced: widths that fitted need not."""
        self._fitted.clear()

    def _check_place(self, gaps: Sequence[Gap], own: float) -> None:
        """Far too wide, widths make honest messages leave as much as a liar's: forget them where nobody fits."""
        if _fits(gaps, GAP, own):
            self._strays = 0
            return
        self._strays = (self._strays + 1) % STRAYS
        if not self._strays:
            self._shapes.clear()
            self._fitted.clear()
        raise NetworkError(ELSEWHERE)

    def _check_fit(self, fitted: Sequence[bool], gaps: Sequence[Gap], own: float) -> None:
        """Too narrow, widths make blocks wrap; but bytes that stand for no weights wrap as well, and would teach steps
        too wide for everybody else. It is no offence: widths are learnt from one exchange for the next."""
        if _fits(list(compress(gaps, fitted)), NEARER, own):
            self._misfits = 0
            return
        self._misfits = (self._misfits + 1) % MISFITS
        if self._misfits:
            raise NetworkError(ELSEWHERE)


def length(norms: Iterable[float]) -> float:
    """The L2 norm of a whole whose pieces have these."""
    return float(torch.linalg.vector_norm(torch.tensor(list(norms))))


def _fits(gaps: Sequence[Gap], share: float, own: float) -> bool:
    """At most this share of what was told is left. False for NaN."""
    told, left = (length(getattr(gap, name) for gap in gaps) for name in ("told", "left"))
    return left <= max(share * told, LEAST_GAP * own)
