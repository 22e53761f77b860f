"""Negotiation of step widths or of a rank before encoding, with one interface for every codec.

Modular codecs keep a shape, one byte per block, for each fragment. An adaptive low-rank codec proposes the rank that
its side wants, and both use the smaller one. For all other codecs shapes and proposals are empty, and nothing is sent.
The caller need not know the codec::

    shape = first_shape(codec, reference)              once per fragment, before its first exchange
    mine  = proposal_for(codec, shape, snapshot)           our proposal, sent before the message
    terms = agree(codec, n, mine, theirs)              equal terms on both sides
    message = codec.encode(snapshot, terms)
    comparison = compare(codec, message, their_message, terms)
    shape = next_shape(codec, shape, terms, comparison)        even if the exchange is not committed
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct
from typing import TypeGuard

import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError
from p2ptrain.codec import steps
from p2ptrain.codec.base import Buffer, Codec, CodecTerms, Matrices
from p2ptrain.codec.lowrank import LowRankCodec
from p2ptrain.codec.modular import Comparison, ModularCodec
from p2ptrain.codec.steps import FIRST_PACE

RANK = Struct("<H")
"""A proposed rank."""


def first_shape(
    codec: Codec,
    reference: Tensor,  # [n] fp32
) -> bytes:
    """Return the shape of a fragment before the first exchange, one byte per block.

    A good reference is the change of the fragment by this peer's own training, since peers of a run start from equal
    weights and differ where they trained. Without one, use the snapshot; more blocks of the first exchange then wrap.
    """
    if not isinstance(codec, ModularCodec):
        return b""
    return steps.first_shape(reference, codec.block_size)


def proposal_size(codec: Codec, elements: int) -> int:
    """Return the bytes of a proposal for a fragment of that many elements."""
    if is_adaptive(codec):
        return RANK.size
    return codec.blocks(elements) + steps.SKETCH_BYTES if isinstance(codec, ModularCodec) else 0


def proposal_for(
    codec: Codec,
    shape: bytes,
    snapshot: Tensor,  # [n] fp32, host memory
    rank: int = 0,  # that this side wants; 0: the codec's
) -> bytes:
    """Make the proposal for a fragment. It takes one pass over the snapshot, so keep it while both are unchanged.

    Encode this snapshot and no newer one, because the partner compares the message with the proposal.
    """
    if is_adaptive(codec):
        return RANK.pack(min(rank or codec.rank, codec.rank))
    return shape + steps.sketch(snapshot) if isinstance(codec, ModularCodec) else b""


def agree(codec: Codec, elements: int, mine: bytes, theirs: bytes, matrices: Matrices = ()) -> CodecTerms:
    """Return the terms of one exchange of a fragment from both proposals; equal on both sides.

    Raises:
        RemoteError: their proposal is invalid for this codec and fragment.
    """
    if is_adaptive(codec):
        return CodecTerms(elements, matrices=matrices, rank=min(_rank(codec, mine), _rank(codec, theirs)))
    if not isinstance(codec, ModularCodec):
        if theirs:
            raise RemoteError(f"it proposes step widths, which codec {codec.name} does not use")
        return CodecTerms(elements, matrices=matrices)
    shape, level = steps.agreed(mine, theirs)
    seed = blake2b(min(mine, theirs) + max(mine, theirs), digest_size=32).digest()
    return CodecTerms(elements, shape, level, seed, matrices)


def is_adaptive(codec: Codec) -> TypeGuard[LowRankCodec]:
    """Return whether both sides agree on the rank of each message."""
    return isinstance(codec, LowRankCodec) and codec.is_adaptive


def _rank(codec: LowRankCodec, proposal: bytes) -> int:
    """Read a proposed rank. Raises RemoteError unless it is one that the codec can have."""
    if len(proposal) != RANK.size:
        raise RemoteError(f"it proposes a rank in {len(proposal)} bytes, not {RANK.size}")
    (rank,) = RANK.unpack(proposal)
    if not 1 <= rank <= codec.rank:
        raise RemoteError(f"it proposes rank {rank}, but the run allows 1 to {codec.rank}")
    return int(rank)


def apart(codec: Codec, mine: bytes, theirs: bytes) -> Tensor:
    """Return the sketch of theirs - mine from both proposals, [64] fp64; empty for a codec without proposals.

    Its L2 norm is the distance of both snapshots with a standard error of 9 %.
    """
    return steps.apart(mine, theirs) if isinstance(codec, ModularCodec) else torch.zeros(0, dtype=torch.float64)


def unexplained(
    told: Tensor,  # [64] or [0], from ``apart``
    difference: Tensor,  # [n] fp32, from the messages of the same two snapshots
) -> Tensor:
    """Return the sketch of the part of the proposed difference that the messages do not explain, [64] or [0]."""
    return told - steps.sums(difference) if len(told) else told


def compare(codec: Codec, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Comparison:
    """Compute the difference and the input of ``next_shape``. Raises RemoteError like ``codec.difference``."""
    if isinstance(codec, ModularCodec):
        return codec.compare(mine, theirs, terms)
    return Comparison(codec.difference(mine, theirs, terms), torch.zeros(0, dtype=torch.uint8))


def next_shape(codec: Codec, shape: bytes, terms: CodecTerms, comparison: Comparison, pace: int = FIRST_PACE) -> bytes:
    """Return the fragment's shape after an exchange, at most ``pace`` quarter octaves from the old one."""
    if not isinstance(codec, ModularCodec):
        return b""
    return steps.next_shape(shape, terms.shape, comparison.fill, codec.bits, pace)
