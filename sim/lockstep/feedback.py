"""Error feedback for streams of pseudo-gradients: the error of a message is added to the next vector.

::

    total    = decay * residual + vector
    message  = encode(total)
    residual = total - decode(message)

With ``decay`` 1 nothing is lost: the sum of all decoded messages and the residual equals the sum of all vectors. A
smaller decay forgets old residuals and replaces the outer momentum, as in SparseLoCo (Sarfi et al., arXiv 2508.15706)
with e <- beta e + g. Error feedback: Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847.

Legend: n elements of a fragment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.codec import CodecTerms, Decodable, LowRankCodec


@dataclass(frozen=True, slots=True)
class Feedback:
    """State of one stream between messages; never sent."""

    residual: Tensor  # [n] fp32 not sent yet
    start: Tensor | None = None  # start of the low-rank codec's next power iteration

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
    """Encode ``vector`` plus the decayed residual; return the message and the new state.

    Raises:
        ValueError: the sum is not finite or exceeds the codec's range.
    """
    total = torch.add(vector, feedback.residual, alpha=decay)
    if isinstance(codec, LowRankCodec):
        message, start = codec.encode_from(total, terms, feedback.start)
        return message, Feedback(total - codec.decode(message, terms), start)
    message = codec.encode(total, terms)
    return message, Feedback(total - codec.decode(message, terms))
