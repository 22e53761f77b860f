"""A home's model and the tokens that a model writes."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from p2ptrain.data.tokenizer import Tokenizer
from p2ptrain.train.generate import Sampling, stream_tokens
from p2ptrain.train.model import FlatModel
from peer.home import Home
from peer.model import newest, run_tokenizer, stored_model


def load_model(home: Home) -> tuple[FlatModel, Tokenizer]:
    """Build the run's model on the CPU with the slow weights of the newest undamaged checkpoint, and its tokenizer.

    Raises HomeError if there is none.
    """
    signed, stored = newest(home)
    model = stored_model(home, signed, stored)
    return model, run_tokenizer(home, signed)


def generate_tokens(
    module: PreTrainedModel,
    prompt: Sequence[int],  # at least one id
    new_tokens: int,
    sampling: Sampling,
    stop: int | None = None,  # an id that ends the text; not part of the result
    vocabulary: int | None = None,  # ids that the tokenizer has, if the model has more; None: the model's
) -> list[int]:
    """Return the ids that follow a prompt, as ``stream_tokens`` yields them."""
    stops = () if stop is None else (stop,)
    return list(stream_tokens(module, prompt, new_tokens, sampling, stops, vocabulary))
