"""Codecs, the other half of the numeric core: two snapshots -> two messages -> one difference.

Peers i and j agree on ``CodecTerms``, encode their snapshots and swap the messages. Each side then holds the same two
byte strings and computes ``difference(mine, theirs, terms)``, approximately ``theirs - mine``. Two promises make gossip
safe whatever a codec loses:

- **antisymmetry to the bit**: the two sides' differences are exact negatives, so the pair's mean does not move;
- **any bytes** are either refused with RemoteError or yield finite numbers of the right shape.

No ``Codec`` promises that one message can be read alone: a modular code has meaning only beside the partner's. Those
that can be are ``Decodable`` as well, which averages over many peers and error feedback need.

========  ============================  =============================================================  ===============
name      bits an element               error                                                          may carry
========  ============================  =============================================================  ===============
fp32      32                            none                                                           both
bf16      16                            at most 2^-8 of the element                                    both
fp16      16                            at most 2^-11 of it, or 2^-25; nothing beyond 65504            both
int8      8 + 16 / block size           at most half a step, 1/254 of the block's largest (+ 1/128)    both
int4      4 + 16 / block size           at most half a step, 1/14 of the block's largest (+ 1/128)     both
modular8  8 + 24 / block size           about .05 of the disagreement                                  weights
modular4  4 + 24 / block size           about .4 of the disagreement                                   weights
topk      .227                          all but the largest 64 of 4096: needs error feedback           gradients
lowrank   4.25 rank (m + c) / (m c)     all but a few components: needs error feedback                 gradients
========  ============================  =============================================================  ===============

``block size``: elements that share a scale or a step, 1024 by default. The modular codecs also need 256 bytes a
fragment; ``wishes`` says what must be agreed on before. A codec is stateless and may be called from any thread; memory
beside input and output is bounded (``door.CHUNK``), but for the low-rank factors. All work on host memory.
"""

from p2ptrain.codec.base import LARGEST_MAGNITUDE, Buffer, Codec, CodecTerms, Decodable, Matrices
from p2ptrain.codec.blockwise import DEFAULT_BLOCK_SIZE, BlockwiseCodec
from p2ptrain.codec.dense import BF16, FP16, FP32, DenseCodec
from p2ptrain.codec.feedback import Feedback, compress, is_decodable, needs_feedback
from p2ptrain.codec.lowrank import DEFAULT_RANK, LowRankCodec
from p2ptrain.codec.modular import Comparison, ModularCodec
from p2ptrain.codec.negotiation import (
    agree,
    apart,
    compare,
    first_shape,
    next_shape,
    unexplained,
    wish_for,
    wish_size,
)
from p2ptrain.codec.shapes import effective_rank, matrices
from p2ptrain.codec.steps import FIRST_PACE, PACE
from p2ptrain.codec.topk import TopKCodec

WEIGHT_CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "modular8", "modular4")
"""What weights may travel in: codecs that leave out no element."""

GRADIENT_CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "topk", "lowrank")
"""What pseudo-gradients may travel in: codecs whose messages can be read alone."""


def get(name: str, block_size: int = DEFAULT_BLOCK_SIZE, rank: int = DEFAULT_RANK) -> Codec:
    """The codec a manifest names.

    Args:
        name: one of ``WEIGHT_CODECS`` or ``GRADIENT_CODECS``.
        block_size: elements that share a scale or a step; int8, int4 and the modular codecs read it.
        rank: of lowrank.

    Raises:
        ValueError: a name, block size or rank that no manifest may carry.
    """
    if name in ("modular8", "modular4"):
        return ModularCodec(int(name[-1]), block_size)
    return get_decodable(name, block_size, rank)


def get_decodable(name: str, block_size: int = DEFAULT_BLOCK_SIZE, rank: int = DEFAULT_RANK) -> Decodable:
    """The same for one of ``GRADIENT_CODECS``. Raises ValueError also for the modular codecs."""
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
            return LowRankCodec(rank)
        case "modular8" | "modular4":
            raise ValueError(
                f"codec {name} carries weights, whose messages nobody can read alone; "
                f"for pseudo-gradients there are {', '.join(GRADIENT_CODECS)}"
            )
    known = dict.fromkeys(WEIGHT_CODECS + GRADIENT_CODECS)
    raise ValueError(f"no codec is called {name!r}; there are {', '.join(known)}")


__all__ = [
    "BF16",
    "DEFAULT_BLOCK_SIZE",
    "DEFAULT_RANK",
    "FIRST_PACE",
    "FP16",
    "FP32",
    "GRADIENT_CODECS",
    "LARGEST_MAGNITUDE",
    "PACE",
    "WEIGHT_CODECS",
    "BlockwiseCodec",
    "Buffer",
    "Codec",
    "CodecTerms",
    "Comparison",
    "Decodable",
    "DenseCodec",
    "Feedback",
    "LowRankCodec",
    "Matrices",
    "ModularCodec",
    "TopKCodec",
    "agree",
    "apart",
    "compare",
    "compress",
    "effective_rank",
    "first_shape",
    "get",
    "get_decodable",
    "is_decodable",
    "matrices",
    "needs_feedback",
    "next_shape",
    "unexplained",
    "wish_for",
    "wish_size",
]
