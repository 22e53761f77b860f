"""Which codec each fragment has, and how many bytes it takes: a function of the run's rules alone.

The network identifies fragments by number: 0 to F - 1 are the weights, slow or fast, F to 2 F - 1 the pseudo-gradients.

Legend: F fragments.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.codec import Codec, CodecTerms, Matrices, proposal_size
from p2ptrain.recipes import Stream


class FragmentCodecs:
    """Codecs and sizes of fragments.

    Args:
        lengths: elements of each fragment.
        codec: for the weights.
        gradient_codec: for pseudo-gradients; None: they are not exchanged.
        matrices: of each fragment; empty: unknown.
        shown: which weights partners get.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        codec: Codec,
        gradient_codec: Codec | None,
        matrices: Sequence[Matrices] = (),
        shown: Stream = "slow",
    ) -> None:
        self._streams: tuple[Stream, ...] = (shown, "pseudo_gradient")
        self._lengths = tuple(lengths)
        self._matrices = tuple(matrices) or ((),) * len(self._lengths)
        if len(self._matrices) != len(self._lengths):
            raise ValueError(f"matrices of {len(self._matrices)} fragments, expected {len(self._lengths)}")
        self._codecs = (codec,) if gradient_codec is None else (codec, gradient_codec)

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
