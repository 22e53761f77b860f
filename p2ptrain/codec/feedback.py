"""Error feedback: what a message leaves out is added to the next one. For streams of pseudo-gradients.

::

    total    = decay * residual + vector
    message  = encode(total)
    residual = total - decode(message)

With ``decay`` 1 nothing is ever lost: the sum of all that was decoded, and the residual, is the sum of all that was put
in. With less, what waits too long fades, which takes the place of the outer momentum: SparseLoCo (Sarfi et al., arXiv
2508.15706) with e <- beta e + g. Error feedback: Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847.

Legend: n elements of a fragment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from p2ptrain.codec.base import Codec, CodecTerms, Decodable
from p2ptrain.codec.lowrank import LowRankCodec
from p2ptrain.codec.topk import TopKCodec


def needs_feedback(codec: Codec) -> bool:
    """Whether messages leave out so much that it must be fed back."""
    return isinstance(codec, TopKCodec | LowRankCodec)


def is_decodable(codec: Codec) -> TypeGuard[Decodable]:
    """Whether a message can be read alone."""
    return hasattr(codec, "decode")


@dataclass(frozen=True, slots=True)
class Feedback:
    """What one stream carries from message to message. Belongs into the checkpoint; never travels."""

    residual: Tensor  # [n] fp32 what is still to be sent
    start: Tensor | None = None  # where the low-rank codec's power iteration goes on

    @classmethod
    def empty(cls, elements: int) -> Feedback:
        return cls(torch.zeros(elements))


def compress(
    codec: Decodable,
    vector: Tensor,  # [n] fp32, host memory
    feedback: Feedback,
    terms: CodecTerms,
    decay: float = 1.0,
) -> tuple[bytes, Feedback]:
    """The message for ``vector`` and what was left over before, and what is left over now.

    Raises:
        ValueError: the sum is not finite or beyond what the codec can carry.
    """
    total = torch.add(vector, feedback.residual, alpha=decay)
    if isinstance(codec, LowRankCodec):
        message, start = codec.encode_from(total, terms, feedback.start)
        return message, Feedback(total - codec.decode(message, terms), start)
    message = codec.encode(total, terms)
    return message, Feedback(total - codec.decode(message, terms))
