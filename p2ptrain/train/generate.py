"""Text samples from a model: the same seed and weights give the same text.

This loop has its own random generator, so training's random state does not change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.data.chat_tokens import answer_ends
from p2ptrain.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters for drawing the next token."""

    temperature: float = 0.8
    """Softmax temperature; 0 takes the likeliest token. Guess: samples of small models at several temperatures would
    settle it."""
    top_k: int | None = 50
    """Number of likeliest tokens to draw from; None: all. The default is that of transformers."""
    seed: int = 0


def generate_text(
    module: PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: str,
    new_tokens: int,
    sampling: Sampling,
    ends: Collection[int] = (),  # ids that end a text, beside the separator
) -> str:
    """Return the prompt and up to ``new_tokens`` further tokens; stop early if the model ends the document."""
    text_ids = tokenizer.encode_batch([prompt or "\n"])[0].tolist()  # "\n" may be lost
    prompt_ids = [*tokenizer.prefix, *text_ids] or [tokenizer.separator or 0]
    stops = {*ends, *(() if tokenizer.separator is None else (tokenizer.separator,))}
    ids = stream_tokens(module, prompt_ids, new_tokens, sampling, stops, tokenizer.vocabulary_size, tokenizer.prefix)
    return tokenizer.decode([*prompt_ids, *ids])


def sample_text(
    module: PreTrainedModel,
    tokenizer: Tokenizer,
    dialogue: Sequence[int],  # ids up to the beginning of an answer; empty: the run was taught no dialogues
    end_of_turn: str,  # text that ends an answer
    new_tokens: int,
) -> str:
    """Return a text of up to so many new tokens that a run's model writes; of dialogues, an answer."""
    if not dialogue:
        return generate_text(module, tokenizer, "", new_tokens, Sampling())
    stops = answer_ends(tokenizer, end_of_turn)
    ids = stream_tokens(module, dialogue, new_tokens, Sampling(), stops, tokenizer.vocabulary_size, tokenizer.prefix)
    return tokenizer.decode(dialogue) + "".join(text_pieces(ids, tokenizer, dialogue, end_of_turn))


def stream_tokens(
    module: PreTrainedModel,
    prompt: Sequence[int],  # at least one id
    new_tokens: int,
    sampling: Sampling,
    stops: Collection[int] = (),  # ids that end the text; not yielded
    vocabulary: int | None = None,  # ids that the tokenizer has, if the model has more; None: the model's
    prefix: Sequence[int] = (),  # ids with which the model's texts begin, also after a window is full
) -> Iterator[int]:
    """Yield the ids that follow a prompt, each as it is drawn. Close the iterator to end earlier.

    Keys and values of past tokens are cached. When the model's window is full, generation continues from its latter
    half.
    """
    window = module.config.get_text_config().max_position_embeddings
    generator = torch.Generator().manual_seed(sampling.seed)
    was_training = module.training
    module.train(False)
    tokens = list(prompt)
    unread, cache, cached = _latest(tokens, window, prefix), None, 0
    try:
        while len(tokens) < len(prompt) + new_tokens:
            if cached + len(unread) > window:
                unread, cache, cached = _latest(tokens, max(1, window // 2), prefix), None, 0
            ids = torch.tensor([unread], device=module.device)
            with torch.no_grad():  # not around a yield, whose caller may compute gradients
                output = module(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, cached = output.past_key_values, cached + len(unread)
            token = _draw(output.logits[0, -1, :vocabulary].float().cpu(), sampling, generator)
            if token in stops:
                return
            tokens.append(token)
            unread = [token]
            yield token
    finally:
        module.train(was_training)


def _latest(tokens: Sequence[int], size: int, prefix: Sequence[int]) -> list[int]:
    """Return at most ``size`` of the last tokens, of which the first are the prefix if older ones are left out."""
    if len(tokens) <= size:
        return [*tokens]
    kept = prefix if len(prefix) < size else ()
    return [*kept, *tokens[len(tokens) - size + len(kept) :]]


def text_pieces(
    ids: Iterable[int],
    tokenizer: Tokenizer,
    before: Sequence[int] = (),  # ids before them, which some tokenizers need to know of a leading space
    stop: str = "",  # text that ends the text; not yielded
) -> Iterator[str]:
    """Yield the text of some ids as soon as it is certain: no part of a character, and no beginning of ``stop``."""
    found = list(before)
    shown = len(tokenizer.decode(found)) if found else 0
    start = shown
    text = ""
    for each in ids:
        found.append(each)
        text = tokenizer.decode(found)
        if stop and (end := text.find(stop, start)) >= 0:
            yield text[shown:end]
            return
        certain = len(text) - _uncertain(text[start:], stop)
        if certain > shown:
            yield text[shown:certain]
            shown = certain
    yield text[shown:]


def _uncertain(text: str, stop: str) -> int:
    """Return how many of the last characters the next id may change or complete to ``stop``."""
    torn = len(text) - len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    begun = next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
    return max(min(torn, 3), begun)  # three bytes at most begin a character without ending it


def _draw(
    logits: Tensor,  # [V] fp32
    sampling: Sampling,
    generator: torch.Generator,
) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    chances = torch.softmax(logits / sampling.temperature, dim=0)
    return int(torch.multinomial(chances, 1, generator=generator))
