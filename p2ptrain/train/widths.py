"""Step widths of the modular codecs: what one peer learns of them, and which exchanges do not fit what was agreed.

A modular message says only where each weight is modulo so many steps, and the steps are as wide as two sketches say
that both sides are apart. Sketches are linear: from the sketches' difference t, what the messages yield, d, can be
taken away, and ||t - d|| is what the messages lost, or say beyond what was told. Both sides have both messages and both
sketches, and find the same.

Codecs without steps have no sketches either: nothing is told, nothing is left, and everything fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.codec import Codec, CodecTerms, Comparison, first_shape, next_shape
from p2ptrain.errors import NetworkError

ELSEWHERE = "its weights are not where it said they are"

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

FITS = 3
"""Exchanges that fitted before widths count as known. In a young swarm they change as quickly as the weights: of three
tiny peers every third was left alone for widths that had fitted once."""

MISFITS = 3
"""In a row, and it is our widths that are too narrow. Two were often two liars among eight."""

STRAYS = 9
"""In a row, and it is our widths that are too wide. A guess; one exchange with whoever taught us these starts the count
again (docs/SECURITY.md, coarse steps)."""


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
        self._fits: Counter[int] = Counter()
        """By the network's number, exchanges whose widths fitted, since our weights are what they are."""
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

    def check(self, fragments: Sequence[int], fits: Sequence[Fit], own: float) -> None:
        """Raises NetworkError where an exchange must be neither mixed nor learnt from.

        Args:
            own: length of our own weights in these fragments.
        """
        self._check_place(fits, own)
        self._check_blocks([fit for number, fit in zip(fragments, fits, strict=True) if self._fits[number] >= FITS])

    def learn(self, number: int, codec: Codec, terms: CodecTerms, found: Comparison, fit: Fit) -> None:
        """What was measured helps the next exchange, whatever becomes of this one."""
        if not terms.shape:
            return
        self._shapes[number] = next_shape(codec, self._shapes.get(number, terms.shape), terms, found)
        if fit.told > 0 and fit.wrapped <= MISFIT_SHARE:  # equal weights fit any widths
            self._fits[number] += 1

    def begin_anew(self) -> None:
        """Our weights were replaced: widths that fitted need not."""
        self._fits.clear()

    def _check_place(self, fits: Sequence[Fit], own: float) -> None:
        """Far too wide, widths make honest messages leave as much as a liar's: forget them where nobody fits."""
        told, left = length(fit.told for fit in fits), length(fit.left for fit in fits)
        if left <= max(GAP * told, LEAST_GAP * own):  # False for NaN
            self._strays = 0
            return
        self._strays = (self._strays + 1) % STRAYS
        if not self._strays:
            self._shapes.clear()
            self._fits.clear()
        raise NetworkError(ELSEWHERE)

    def _check_blocks(self, known: Sequence[Fit]) -> None:
        """Too narrow, widths make blocks wrap; but bytes that stand for no weights wrap as well: they would count as no
        difference, which no gate for distances stops, and teach steps too wide for everybody else. It is no offence:
        widths are learnt from one exchange for the next."""
        blocks = sum(fit.blocks for fit in known)
        if blocks < MISFIT_BLOCKS or sum(fit.wrapped * fit.blocks for fit in known) <= MISFIT_SHARE * blocks:
            self._misfits = 0
            return
        self._misfits = (self._misfits + 1) % MISFITS
        if self._misfits:
            raise NetworkError(ELSEWHERE)


def length(norms: Iterable[float]) -> float:
    """The L2 norm of a whole whose pieces have these."""
    return float(torch.linalg.vector_norm(torch.tensor(list(norms))))
