"""Codecs: two snapshots -> two messages -> one difference.

Peers i and j agree on ``CodecTerms``, encode their snapshots and swap the messages. Each side then holds the same two
byte strings and computes ``difference(mine, theirs, terms)``, approximately ``theirs - mine``. Two guarantees make
gossip safe for any lossy codec:

- **Antisymmetry to the bit**: the two sides' differences are exact negatives, so the pair's mean does not move.
- **Any bytes** are either rejected with RemoteError or yield finite numbers of the right shape.

A ``Codec`` message need not be readable alone: a modular code has a meaning only with the partner's. A ``Decodable``
codec has messages that are, as averages over many peers and error feedback require.

docs/ALGORITHMS.md lists the codecs with the bits and the error of an element, and what each may carry.
``block size``: elements that share a scale or a step width, 1024 by default. The modular codecs also send proposals
before the message, one byte per block and 256 bytes per fragment, and an adaptive low-rank codec proposes its rank
(``codec.negotiation``). Codecs are stateless and
thread-safe, and work on host memory. Memory beyond input and output is bounded (``base.CHUNK``), except for low-rank
factors.
"""

from p2ptrain.base.codec_names import CODECS, GRADIENT_CODECS, MODULAR_CODECS
from p2ptrain.codec.base import (
    DEFAULT_BLOCK_SIZE,
    LARGEST_MAGNITUDE,
    Codec,
    CodecTerms,
    Decodable,
    Matrices,
    is_decodable,
)
from p2ptrain.codec.blockwise import BlockwiseCodec
from p2ptrain.codec.dense import BF16, FP16, FP32
from p2ptrain.codec.lowrank import DEFAULT_RANK, LowRankCodec
from p2ptrain.codec.modular import Comparison, ModularCodec
from p2ptrain.codec.negotiation import (
    agree,
    apart,
    compare,
    first_shape,
    is_adaptive,
    next_shape,
    proposal_for,
    proposal_size,
    unexplained,
)
from p2ptrain.codec.shapes import matrices, weighted_ranks
from p2ptrain.codec.steps import FIRST_PACE, PACE
from p2ptrain.codec.topk import TopKCodec


def get(name: str, block_size: int = DEFAULT_BLOCK_SIZE, rank: int = DEFAULT_RANK, adaptive: bool = False) -> Codec:
    """Return a codec by the name in the manifest.

    Args:
        name: one of ``WEIGHT_CODECS`` or ``GRADIENT_CODECS``.
        block_size: elements that share a scale or a step width; only int8, int4 and the modular codecs read it.
        rank: only lowrank reads it.
        adaptive: whether lowrank agrees on a rank of each message, at most ``rank``.

    Raises:
        ValueError: the name, block size or rank is not valid in a manifest.
    """
    if name in MODULAR_CODECS:
        return ModularCodec(int(name[-1]), block_size)
    return get_decodable(name, block_size, rank, adaptive)


def get_decodable(
    name: str, block_size: int = DEFAULT_BLOCK_SIZE, rank: int = DEFAULT_RANK, adaptive: bool = False
) -> Decodable:
    """Return one of ``GRADIENT_CODECS`` by name; see ``get``. Raises ValueError also for the modular codecs."""
    match name:
        case "fp32":
            return FP32
        case "bf16":
            return BF16
        case "fp16":
            return FP16
        case "int8" | "int4":
            return BlockwiseCodec(int(name[-1]), block_size)
        case "topk":
            return TopKCodec()
        case "lowrank":
            return LowRankCodec(rank, adaptive)
    if name in MODULAR_CODECS:
        raise ValueError(
            f"codec {name} carries weights, and its messages cannot be read alone; "
            f"codecs for pseudo-gradients: {', '.join(GRADIENT_CODECS)}"
        )
    raise ValueError(f"unknown codec {name!r}; codecs: {', '.join(CODECS)}")


__all__ = [
    "CODECS",
    "FIRST_PACE",
    "LARGEST_MAGNITUDE",
    "PACE",
    "Codec",
    "CodecTerms",
    "Comparison",
    "Decodable",
    "LowRankCodec",
    "Matrices",
    "agree",
    "apart",
    "compare",
    "first_shape",
    "get",
    "get_decodable",
    "is_adaptive",
    "is_decodable",
    "matrices",
    "next_shape",
    "proposal_for",
    "proposal_size",
    "unexplained",
    "weighted_ranks",
]
