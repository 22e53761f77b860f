"""The exchange's numeric half: a published snapshot to bytes, two byte strings to a difference.

Any thread may call everything here but ``publish``: what is read is one published snapshot, a tuple of immutable
tensors that the trainer replaces as a whole.

To the network a fragment is a number: 0 to F - 1 the weights, slow or fast, F to 2 F - 1 the pseudo-gradients.

Legend: n elements of one fragment, F fragments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from p2ptrain import codec as codecs
from p2ptrain.base.errors import MisfitError, RemoteError
from p2ptrain.codec import (
    Codec,
    CodecTerms,
    Matrices,
    agree,
    apart,
    compare,
    unexplained,
    wish_for,
    wish_size,
)
from p2ptrain.outer import l2_norm
from p2ptrain.recipes import Stream
from p2ptrain.train.widths import Fit, WidthFeedback, Widths

ELSEWHERE = "its weights are not where it said they are"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some fragments of one snapshot, as bytes."""

    fragments: tuple[int, ...]
    parts: tuple[bytes, ...]
    norm: float
    """L2 norm of the snapshot's fragments."""
    step: int
    """Outer steps that the snapshot had behind it."""
    terms: tuple[CodecTerms, ...]
    """What both sides agreed on for each fragment."""
    told: tuple[Tensor, ...]  # [64] each, or [0]
    """Sketches of what lies between both sides' fragments, as they told before either encoded."""

    @property
    def size_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Difference:
    """What a swap yields: theirs - mine, finite."""

    fragments: tuple[int, ...]
    parts: tuple[Tensor, ...]  # [n] fp32 each
    distance: float
    """||theirs - mine|| / ||mine||."""
    mine: Encoded
    """What we sent."""
    fingerprint: bytes = b""
    """Of what they sent."""
    sketched: float = 0.0
    """``distance`` as both sides' sketches tell it, 0 where there are none: of blocks that wrapped ``distance`` says
    nothing."""

    @property
    def norm(self) -> float:
        """||mine||."""
        return self.mine.norm


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What partners may have."""

    step: int
    """Outer steps behind it."""
    parts: tuple[Tensor, ...]  # [n] fp32 each, by the network's numbers
    slow: tuple[Tensor, ...]  # [n] fp32 each: what newcomers get


class Payloads:
    """Encodes what was published last, and compares it with what partners send.

    Args:
        lengths: n of each fragment.
        codec: for the weights.
        gradient_codec: for pseudo-gradients; None: they are not exchanged.
        matrices: that lie in each fragment, the same on all peers of a run; none at all: nothing is known of them.
        shown: which weights partners get, the slow or the fast ones.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        codec: Codec,
        gradient_codec: Codec | None,
        matrices: Sequence[Matrices] = (),
        shown: Stream = "slow",
    ) -> None:
        self.published = Snapshot(0, (), ())
        self._streams: tuple[Stream, ...] = (shown, "pseudo_gradient")
        self._lengths = tuple(lengths)
        self._matrices = tuple(matrices) or ((),) * len(self._lengths)
        if len(self._matrices) != len(self._lengths):
            raise ValueError(f"matrices of {len(self._matrices)} fragments, and there are {len(self._lengths)}")
        self._codecs = (codec,) if gradient_codec is None else (codec, gradient_codec)
        self._widths = Widths()

    @property
    def streams(self) -> int:
        """How many tensors of each fragment partners may have: 2 when the recipe mixes pseudo-gradients."""
        return len(self._codecs)

    def place(self, number: int) -> tuple[Stream, int]:
        """The stream and the fragment that a number of the network's stands for."""
        kind, fragment = divmod(number, len(self._lengths))
        return self._streams[kind], fragment

    def codec(self, number: int) -> Codec:
        """What this number travels in."""
        return self._codecs[number // len(self._lengths)]

    def publish(self, snapshot: Snapshot) -> None:
        """The trainer alone calls this."""
        self.published = snapshot

    @property
    def knows_nothing(self) -> bool:
        """The codec needs step widths, and nothing was measured yet: ``foresee`` helps."""
        return self._widths.are_unknown and bool(self.wish_sizes(range(len(self._lengths))))

    def foresee(
        self,
        movements: Sequence[Tensor],  # [n] each: what an inner phase so far, or an outer step, moved
    ) -> None:
        """Peers of one run begin alike, so before anything was measured they differ where training moved them.

        What stood still foretells nothing: a phase that was dropped, or one that has not begun yet. Two peers that
        agreed on widths of nothing would find ever after that nothing lies between them.
        """
        moved = {number: movement for number, movement in enumerate(movements) if movement.any()}
        self._widths.foresee({number: self.codec(number) for number in moved}, moved)

    # --- one exchange -------------------------------------------------------------------------------------------------

    def wish_sizes(self, fragments: Sequence[int]) -> list[int]:
        """Bytes of each wish, ours as a partner's; empty where there are none."""
        sizes = [wish_size(self.codec(number), self._length(number)) for number in fragments]
        return sizes if any(sizes) else []

    def wishes(self, fragments: Sequence[int], snapshot: Snapshot | None = None) -> tuple[bytes, ...]:
        """What to tell a partner before either encodes, a part a fragment; empty where the codec needs no agreement.

        Args:
            snapshot: that will be encoded; None: what is published now.
        """
        if not self.wish_sizes(fragments):
            return ()
        parts = (snapshot or self.published).parts
        return tuple(self._wish(number, parts[number]) for number in fragments)

    def encode(
        self,
        fragments: Sequence[int],
        mine: Sequence[bytes] = (),
        theirs: Sequence[bytes | bytearray] = (),
        snapshot: Snapshot | None = None,
    ) -> Encoded:
        """These fragments as bytes.

        Args:
            mine, theirs: both sides' wishes, where the codec has any.
            snapshot: that our wishes told of, which the partner holds us to; None: what is published now.

        Raises:
            RemoteError: their wishes are none for this codec.
        """
        snapshot = snapshot or self.published
        none = [b""] * len(fragments)
        terms = tuple(
            agree(self.codec(number), self._length(number), ours, bytes(other), self._matrices_of(number))
            for number, ours, other in zip(fragments, mine or none, theirs or none, strict=True)
        )
        values = [snapshot.parts[number] for number in fragments]
        parts = tuple(
            self.codec(number).encode(each, agreed)
            for number, each, agreed in zip(fragments, values, terms, strict=True)
        )
        told = tuple(
            apart(self.codec(number), ours, bytes(other))
            for number, ours, other in zip(fragments, mine or none, theirs or none, strict=True)
        )
        return Encoded(tuple(fragments), parts, _norm(values), snapshot.step, terms, told)

    def difference(self, mine: Encoded, theirs: Sequence[bytes | bytearray]) -> Difference:
        """What to move towards. Raises RemoteError when their bytes are malformed or not finite, MisfitError when they
        do not fit what was agreed."""
        pairs = list(zip(mine.fragments, mine.parts, theirs, mine.terms, strict=True))
        compared = [compare(self.codec(number), ours, other, terms) for number, ours, other, terms in pairs]
        parts = tuple(each.difference for each in compared)
        norm = _norm(parts)
        if not norm < float("inf"):
            raise RemoteError("its weights are not finite")
        fits = [
            Fit(float(told.norm()), float(unexplained(told, part).norm()), len(each.largest), each.wrapped)
            for told, part, each in zip(mine.told, parts, compared, strict=True)
        ]
        verdict = self._widths.judge(mine.fragments, fits, mine.norm)
        for (number, _, _, terms), each, fit in zip(pairs, compared, fits, strict=True):
            self._widths.learn(number, self.codec(number), terms, each, fit, verdict)
        if verdict is not WidthFeedback.FITS:
            raise MisfitError(ELSEWHERE)
        own = max(mine.norm, torch.finfo(torch.float32).tiny)
        sketched = math.hypot(*(fit.told for fit in fits))
        return Difference(mine.fragments, parts, norm / own, mine, _fingerprint(theirs), sketched / own)

    def begin_anew(self) -> None:
        """Our weights were replaced: step widths that fitted need not."""
        self._widths.begin_anew()

    def encoded_sizes(self, fragments: Sequence[int]) -> list[int]:
        """Bytes of each fragment as ``encode`` makes them, and as a partner's must be."""
        return [
            self.codec(number).encoded_size(CodecTerms(self._length(number), matrices=self._matrices_of(number)))
            for number in fragments
        ]

    # --- whole models -------------------------------------------------------------------------------------------------

    def weights(self) -> list[bytes]:
        """All slow weights of the present snapshot, fp32: what a newcomer gets."""
        fp32 = codecs.get("fp32")
        return [fp32.encode(fragment, CodecTerms(fragment.numel())) for fragment in self.published.slow]

    def slow(self) -> Sequence[Tensor]:
        """The same, as they lie in memory; nobody writes to them."""
        return self.published.slow

    def weight_sizes(self) -> list[int]:
        """Bytes of each fragment in fp32."""
        return [4 * length for length in self._lengths]

    @property
    def are_zero(self) -> bool:
        """There are no weights yet: all are zero."""
        return not any(bool(part.any()) for part in self.published.slow)

    def check_weights(self, parts: Sequence[bytes | bytearray]) -> None:
        """Raises RemoteError unless a donor's weights have our shapes, are finite, and are such as codecs take."""
        if [len(part) for part in parts] != self.weight_sizes():
            raise RemoteError("its weights have other shapes than ours")
        for part in parts:
            weights = torch.frombuffer(part, dtype=torch.float32)
            if not float(weights.abs().max()) <= codecs.LARGEST_MAGNITUDE:  # False for NaN
                raise RemoteError("its weights are not finite")

    def _wish(self, number: int, values: Tensor) -> bytes:
        codec = self.codec(number)
        return wish_for(codec, self._widths.shape(number, codec, values), values)

    def _length(self, number: int) -> int:
        return self._lengths[number % len(self._lengths)]

    def _matrices_of(self, number: int) -> Matrices:
        return self._matrices[number % len(self._lengths)]


def _fingerprint(parts: Sequence[bytes | bytearray]) -> bytes:
    """16 bytes that tell two payloads apart."""
    digest = blake3()
    for part in parts:
        digest.update(part)
    return digest.digest(length=16)


def _norm(parts: Sequence[Tensor]) -> float:
    return math.hypot(*(l2_norm(part) for part in parts))
