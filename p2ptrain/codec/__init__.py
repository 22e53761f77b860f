"""Codecs, the other half of the numeric core: two snapshots -> two messages -> one difference.

Peers i and j agree on ``CodecTerms``, encode their snapshots and swap the messages. Each side then holds the same two
byte strings and computes ``difference(mine, theirs, terms)``, approximately ``theirs - mine``. Two promises make gossip
safe whatever a codec loses:

- **antisymmetry to the bit**: the two sides' differences are exact negatives, so the pair's mean does not move;
- **any bytes** are either refused with RemoteError or yield finite numbers of the right shape.

No codec promises that one message can be read alone: a modular code (Moniqua, arXiv 2002.11787) has meaning only
beside the partner's. That is why the door has no ``decode``.

======  ====================  ==============================================
name    bits an element       error
======  ====================  ==============================================
fp32    32                    none
bf16    16                    at most 2^-8 of the element
int8    8 + 16 / block size   at most half a step, 1/254 of the block's largest (and up to 1/128 of that more)
======  ====================  ==============================================

A codec is stateless and may be called from any thread; memory beside input and output is bounded (see ``door.CHUNK``).
"""

from p2ptrain.codec.dense import BF16, FP32, DenseCodec
from p2ptrain.codec.door import LARGEST_MAGNITUDE, Buffer, Codec, CodecTerms
from p2ptrain.codec.int8 import DEFAULT_BLOCK_SIZE, Int8Codec


def get(name: str, block_size: int = DEFAULT_BLOCK_SIZE) -> Codec:
    """The codec a manifest names. Raises ValueError for a name or block size that no manifest may carry."""
    if name == "int8":
        return Int8Codec(block_size)
    dense: dict[str, Codec] = {codec.name: codec for codec in (FP32, BF16)}
    if name not in dense:
        raise ValueError(f"no codec is called {name!r}; there are fp32, bf16 and int8")
    return dense[name]


__all__ = [
    "BF16",
    "DEFAULT_BLOCK_SIZE",
    "FP32",
    "LARGEST_MAGNITUDE",
    "Buffer",
    "Codec",
    "CodecTerms",
    "DenseCodec",
    "Int8Codec",
    "get",
]
