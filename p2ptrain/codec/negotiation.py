"""What two sides agree on before they encode, asked alike of every codec.

Most codecs need nothing: shapes and wishes are empty, and nothing travels. The modular ones keep one byte a block for
each fragment. The caller need not know which codec it has::

    shape = first_shape(codec, reference)              once a fragment, before its first exchange
    mine  = wish_for(codec, shape, snapshot)           travels before the message
    terms = agree(codec, n, mine, theirs)              both sides: equal terms
    message = codec.encode(snapshot, terms)
    comparison = compare(codec, message, their_message, terms)
    shape = next_shape(codec, shape, terms, comparison)        whatever becomes of the exchange
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError
from p2ptrain.codec import steps
from p2ptrain.codec.base import Buffer, Codec, CodecTerms, Matrices
from p2ptrain.codec.modular import Comparison, ModularCodec
from p2ptrain.codec.steps import FIRST_PACE


def first_shape(
    codec: Codec,
    reference: Tensor,  # [n] fp32
) -> bytes:
    """What to begin with, before anything was measured: shape of the fragment, one byte a block.

    A good reference is how far this peer's own training moved it, in an outer step or in a phase so far: peers of one
    run begin alike, so they differ where they moved. Where there is none, the snapshot does; the first exchange then
    drops more blocks.
    """
    if not isinstance(codec, ModularCodec):
        return b""
    return steps.first_shape(reference, codec.block_size, codec.bits)


def wish_size(codec: Codec, elements: int) -> int:
    """Bytes of every wish for a fragment of that many elements."""
    return codec.blocks(elements) + steps.SKETCH_BYTES if isinstance(codec, ModularCodec) else 0


def wish_for(
    codec: Codec,
    shape: bytes,
    snapshot: Tensor,  # [n] fp32, host memory
) -> bytes:
    """What to tell the other side about this fragment. One pass over the snapshot: keep it as long as both stay.

    Encode this snapshot in the end and no newer one: who compares what came with what was told refuses the rest.
    """
    return shape + steps.sketch(snapshot) if isinstance(codec, ModularCodec) else b""


def agree(codec: Codec, elements: int, mine: bytes, theirs: bytes, matrices: Matrices = ()) -> CodecTerms:
    """The terms of one exchange of one fragment, from both wishes. Symmetric: both sides come to the same.

    Raises:
        RemoteError: their wish is none for this codec and fragment.
    """
    if not isinstance(codec, ModularCodec):
        if theirs:
            raise RemoteError(f"it asks for step widths, which codec {codec.name} does not have")
        return CodecTerms(elements, matrices=matrices)
    shape, level = steps.agreed(mine, theirs)
    return CodecTerms(elements, shape, level, matrices)


def apart(codec: Codec, mine: bytes, theirs: bytes) -> Tensor:
    """[64] fp64 the sketch of theirs - mine, as both wishes tell it; empty for a codec without wishes.

    Its L2 norm is the distance of both snapshots within a standard error of 9 %.
    """
    return steps.apart(mine, theirs) if isinstance(codec, ModularCodec) else torch.zeros(0, dtype=torch.float64)


def unexplained(
    told: Tensor,  # [64] or [0]: of ``apart``
    difference: Tensor,  # [n] fp32: what the two messages say of the same two snapshots
) -> Tensor:
    """[64] or [0] what is left of what was told: the sketch of all that the messages lost, or say beyond it."""
    return told - steps.sums(difference) if len(told) else told


def compare(codec: Codec, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Comparison:
    """``codec.difference``, with what the next shape follows from. Raises as it does."""
    if isinstance(codec, ModularCodec):
        return codec.compare(mine, theirs, terms)
    return Comparison(codec.difference(mine, theirs, terms), torch.zeros(0, dtype=torch.uint8))


def next_shape(codec: Codec, shape: bytes, terms: CodecTerms, comparison: Comparison, pace: int = FIRST_PACE) -> bytes:
    """The fragment's shape after an exchange under ``terms``, ``pace`` quarter octaves away at most."""
    if not isinstance(codec, ModularCodec):
        return b""
    return steps.next_shape(shape, terms.shape, comparison.largest, codec.bits, pace)
