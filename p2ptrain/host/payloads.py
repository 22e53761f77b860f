"""Numeric part of an exchange: a published snapshot to bytes, two payloads to a difference.

Any thread may call everything except ``publish`` and ``settle``: readers use one published snapshot, a tuple of
immutable tensors that the trainer replaces as a whole.

Legend: n elements of one fragment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from blake3 import blake3
from torch import Tensor

from p2ptrain import codec as codecs
from p2ptrain.base.errors import MISFIT, MisfitError, RemoteError
from p2ptrain.codec import (
    Codec,
    CodecTerms,
    Matrices,
    agree,
    apart,
    compare,
    proposal_for,
    proposal_size,
    unexplained,
)
from p2ptrain.host.sketch import sketch
from p2ptrain.host.widths import WidthFeedback, Widths, judge
from p2ptrain.outer.mixing import displacement, l2_norm
from p2ptrain.recipes import Stream
from p2ptrain.swarm.download_plan import Span
from p2ptrain.swarm.events import Commit

TINY = torch.finfo(torch.float32).tiny
"""Norm of our weights by which distances are divided, at least."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Fragments of one snapshot as bytes."""

    fragments: tuple[int, ...]
    parts: tuple[bytes, ...]
    norms: tuple[float, ...]
    """L2 norm of each fragment of the snapshot."""
    step: int
    terms: tuple[CodecTerms, ...]
    """Terms that both sides agreed on for each fragment."""
    sketch_differences: tuple[Tensor, ...]  # [64] each, or [0]
    """Sketches of the differences between both sides' fragments, from both proposals."""

    @property
    def norm(self) -> float:
        """L2 norm of all these fragments."""
        return math.hypot(*self.norms)

    @property
    def size_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Difference:
    """Result of an exchange of payloads: theirs - mine, finite."""

    fragments: tuple[int, ...]
    parts: tuple[Tensor, ...]  # [n] fp32 each
    norms: tuple[float, ...]
    """L2 norm of each part."""
    mine: Encoded
    fingerprint: bytes = b""
    sketched_norms: tuple[float, ...] = ()
    """Estimates of ``norms`` from both sides' sketches, 0 without sketches; valid also if blocks wrapped, unlike
    ``norms``."""

    @property
    def norm(self) -> float:
        """L2 norm of our fragments."""
        return self.mine.norm

    @property
    def distance(self) -> float:
        """||theirs - mine|| / ||mine||."""
        return math.hypot(*self.norms) / max(self.norm, TINY)

    @property
    def sketched(self) -> float:
        """Estimate of ``distance`` from the sketches."""
        return math.hypot(*self.sketched_norms) / max(self.norm, TINY)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Published tensors, which partners may download."""

    step: int
    parts: tuple[Tensor, ...]  # [n] fp32 each, by the network's fragment numbers
    slow: tuple[Tensor, ...]  # [n] fp32 each: for newcomers
    applied: tuple[int, ...] = ()
    """Serial number of the last displacement that each fragment of the weights contains; empty if none will be."""


class Payloads:
    """Encoder of the last published snapshot, and its comparison with partners' payloads.

    The network identifies fragments by number: 0 to F - 1 are the weights, slow or fast, F to 2 F - 1 the
    pseudo-gradients. Codecs and sizes are a function of the run's rules alone.

    Args:
        lengths: elements of each fragment.
        codec: for the weights.
        gradient_codec: for pseudo-gradients; None: they are not exchanged.
        matrices: of each fragment; empty: unknown.
        shown: which weights partners get.
        adds_pending: whether partners get the weights as they will be once committed displacements are applied.
        held: fragments that a keeper holds, the others being empty; None: all.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        codec: Codec,
        gradient_codec: Codec | None,
        matrices: Sequence[Matrices] = (),
        shown: Stream = "slow",
        adds_pending: bool = False,
        held: frozenset[int] | None = None,
    ) -> None:
        self.published = Snapshot(0, (), ())
        self.rank = 0
        """Rank that this side proposes for low-rank messages, if it is negotiated; 0: the codec's. Only the trainer
        writes it."""
        self._streams: tuple[Stream, ...] = (shown, "pseudo_gradient")
        self._lengths = tuple(lengths)
        self._held_sizes = [4 * n if held is None or each in held else 0 for each, n in enumerate(lengths)]
        self._matrices = tuple(matrices) or ((),) * len(self._lengths)
        if len(self._matrices) != len(self._lengths):
            raise ValueError(f"matrices of {len(self._matrices)} fragments, expected {len(self._lengths)}")
        self._codecs = (codec,) if gradient_codec is None else (codec, gradient_codec)
        self._adds_pending = adds_pending
        self._pending: dict[int, tuple[Commit, Difference]] = {}
        """Committed exchanges that the trainer has not applied yet, by serial number."""
        self._widths = Widths()

    # --- fragments ----------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """Tensors of each fragment that partners may get: 2 if the recipe mixes pseudo-gradients, else 1."""
        return len(self._codecs)

    def place(self, number: int) -> tuple[Stream, int]:
        """Return the stream and the fragment of a network number."""
        kind, fragment = divmod(number, len(self._lengths))
        return self._streams[kind], fragment

    def codec(self, number: int) -> Codec:
        return self._codecs[number // len(self._lengths)]

    def proposal_sizes(self, fragments: Sequence[int]) -> list[int]:
        """Return the bytes of each proposal, equal on both sides; empty if the codec has none."""
        sizes = [proposal_size(self.codec(number), self._length(number)) for number in fragments]
        return sizes if any(sizes) else []

    def terms(self, number: int) -> CodecTerms:
        """Return the terms of a fragment before anything is negotiated."""
        return CodecTerms(self._length(number), matrices=self._matrices_of(number))

    def encoded_sizes(self, fragments: Sequence[int]) -> list[int]:
        """Return the bytes of each fragment as ``encode`` makes them and as a partner must send them.

        If the rank is negotiated, these are the most that it may be.
        """
        return [self.codec(number).encoded_size(self.terms(number)) for number in fragments]

    def weight_sizes(self) -> list[int]:
        return [4 * length for length in self._lengths]

    def _length(self, number: int) -> int:
        return self._lengths[number % len(self._lengths)]

    def _matrices_of(self, number: int) -> Matrices:
        return self._matrices[number % len(self._lengths)]

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the published snapshot. Only the trainer calls it."""
        self.published = snapshot

    def expect(self, serial: int, commit: Commit, difference: Difference) -> None:
        """Record a committed exchange, so that ``current`` contains its displacement before the trainer applies it.

        ``serial``: number of the delivery, in the order in which the trainer applies them.
        """
        if self._adds_pending:
            self._pending[serial] = commit, difference

    def settle(self, serial: int) -> None:
        """Forget an exchange whose displacement the published snapshot contains, or that was dropped."""
        self._pending.pop(serial, None)

    def current(self, fragments: Sequence[int]) -> Snapshot:
        """Return the published snapshot with these fragments as they are once all committed displacements are applied.

        So an exchange need not wait until the trainer, in the middle of an inner step, has applied the one before: the
        two peers' weights have the same mean either way. If this peer's training ends first and the recipe mixes the
        fast weights, the trainer applies less of a pending displacement (``Recipe.follow``).
        """
        pending = list(self._pending.items())
        snapshot = self.published  # read later: the trainer publishes before it settles
        parts, has_changed = list(snapshot.parts), False
        for serial, (commit, difference) in pending:
            for number, part, norm in zip(difference.fragments, difference.parts, difference.norms, strict=True):
                is_weight = number < len(snapshot.applied)
                if is_weight and number in fragments and serial > snapshot.applied[number]:
                    parts[number] = parts[number] + displacement(part, commit.share, commit.clip_radius, norm)
                    has_changed = True
        return replace(snapshot, parts=tuple(parts)) if has_changed else snapshot

    # --- step widths --------------------------------------------------------------------------------------------------

    @property
    def lacks_widths(self) -> bool:
        """Whether the codec needs step widths and none are measured or predicted yet (see ``predict_widths``)."""
        return self._widths.are_unknown and bool(self.proposal_sizes(range(len(self._lengths))))

    def predict_widths(
        self,
        movements: Iterable[Tensor],  # [n] each: movement of an inner phase so far, or of an outer step
    ) -> None:
        """Predict step widths from movements: peers begin with equal weights, so at first they differ where training
        moved them.

        Fragments that did not move are skipped (a dropped phase, or one that has not begun): two peers that agreed on
        widths of zero would never measure a difference.
        """
        self._widths.predict_widths(
            (number, self.codec(number), movement) for number, movement in enumerate(movements) if movement.any()
        )

    # --- one exchange -------------------------------------------------------------------------------------------------

    def propose(self, fragments: Sequence[int]) -> tuple[Snapshot, tuple[bytes, ...]]:
        """Return the ``current`` snapshot and its ``proposals``."""
        snapshot = self.current(fragments)
        return snapshot, self.proposals(fragments, snapshot)

    def proposals(self, fragments: Sequence[int], snapshot: Snapshot | None = None) -> tuple[bytes, ...]:
        """Return the proposals to send before encoding, one part per fragment; empty if the codec needs no agreement.

        They describe ``snapshot``, by default the one published now.
        """
        if not self.proposal_sizes(fragments):
            return ()
        parts = (snapshot or self.published).parts
        shapes = [self._widths.shape(number, self.codec(number), parts[number]) for number in fragments]
        return tuple(
            proposal_for(self.codec(number), shape, parts[number], self.rank)
            for number, shape in zip(fragments, shapes, strict=True)
        )

    def encode(
        self,
        fragments: Sequence[int],
        mine: Sequence[bytes] = (),
        theirs: Sequence[bytes | bytearray] = (),
        snapshot: Snapshot | None = None,
    ) -> Encoded:
        """Return these fragments as bytes.

        Args:
            mine, theirs: both sides' proposals, if the codec has any.
            snapshot: the one that this side's proposals describe; None: the ``current`` one.

        Raises:
            RemoteError: the partner's proposals are invalid for this codec.
        """
        snapshot = snapshot or self.current(fragments)
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
        sketch_differences = tuple(
            apart(self.codec(number), ours, bytes(other))
            for number, ours, other in zip(fragments, mine or none, theirs or none, strict=True)
        )
        norms = tuple(l2_norm(each) for each in values)
        return Encoded(tuple(fragments), parts, norms, snapshot.step, terms, sketch_differences)

    def difference(self, mine: Encoded, theirs: Sequence[bytes | bytearray]) -> Difference:
        """Return the difference to the partner's weights.

        Raises:
            RemoteError: the partner's bytes are malformed or not finite.
            MisfitError: they do not fit the agreed step widths.
        """
        pairs = list(zip(mine.fragments, mine.parts, theirs, mine.terms, strict=True))
        found = [compare(self.codec(number), ours, other, terms) for number, ours, other, terms in pairs]
        norms = tuple(l2_norm(each.difference) for each in found)
        if not math.hypot(*norms) < float("inf"):
            raise RemoteError("its weights are not finite")
        fits = [
            self._widths.fit(number, told, unexplained(told, each.difference), each)
            for number, told, each in zip(mine.fragments, mine.sketch_differences, found, strict=True)
        ]
        verdict = judge(fits, mine.norm)
        for number, terms, each, fit in zip(mine.fragments, mine.terms, found, fits, strict=True):
            self._widths.learn(number, self.codec(number), terms, each, fit, verdict)
        if verdict is not WidthFeedback.FITS:
            raise MisfitError(MISFIT)
        parts, sketched = tuple(each.difference for each in found), tuple(fit.sketched for fit in fits)
        return Difference(mine.fragments, parts, norms, mine, fingerprint_of(theirs), sketched)

    def forget_fits(self) -> None:
        """Forget which step widths fitted, because this peer's weights were replaced."""
        self._widths.forget_fits()

    # --- whole models -------------------------------------------------------------------------------------------------

    def weights(self) -> list[bytes]:
        """Return all slow weights of the current snapshot as fp32 bytes, for a newcomer; empty where none are held."""
        fp32 = codecs.get("fp32")
        return [fp32.encode(each, CodecTerms(each.numel())) if each.numel() else b"" for each in self.published.slow]

    def slow(self) -> Sequence[Tensor]:
        """Return the slow weights of the current snapshot; read-only, not a copy."""
        return self.published.slow

    def piece(self, snapshot: Sequence[Tensor], span: Span) -> memoryview:
        """Return these bytes of slow weights as fp32: not a copy, since published weights do not change."""
        view: memoryview = _slice(snapshot, span).numpy().data
        return view

    def sketch(self, span: Span, seed: int) -> bytes:
        """Return the sketch of a piece of the current slow weights."""
        return sketch(_slice(self.published.slow, span), seed)

    @property
    def are_zero(self) -> bool:
        """Whether all weights are zero, so there are none yet; never of a keeper, which adopts the run's."""
        return self._held_sizes == self.weight_sizes() and not any(bool(part.any()) for part in self.published.slow)

    def check_weights(self, parts: Sequence[bytes | bytearray]) -> None:
        """Raise RemoteError unless a donor's weights have the right shapes, are finite and within the codecs' range."""
        if [len(part) for part in parts] != self._held_sizes:
            raise RemoteError("its weights do not have the shapes of the model")
        for part in filter(None, parts):
            weights = torch.frombuffer(part, dtype=torch.float32)
            if not float(weights.abs().max()) <= codecs.LARGEST_MAGNITUDE:  # false for NaN
                raise RemoteError("its weights are not finite")


def fingerprint_of(parts: Sequence[bytes | bytearray]) -> bytes:
    """Return a digest of a partner's payload."""
    digest = blake3()
    for part in parts:
        digest.update(part)
    return digest.digest(length=16)


def _slice(slow: Sequence[Tensor], span: Span) -> Tensor:
    """Return one piece of a model as a view, [n] fp32."""
    return slow[span.fragment][span.start // 4 : span.stop // 4]
