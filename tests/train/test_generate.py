"""Text generation: repeatable, bounded, beyond the window, and equal to the uncached computation."""

import pytest
import torch
from families import DESCRIPTIONS, description
from trained_model import generate_tokens

from p2ptrain.data.tokenizer import ByteTokenizer
from p2ptrain.train.generate import Sampling, generate_text, stream_tokens, text_pieces
from p2ptrain.train.model import build_module

PROMPT = list(b"12 times ")


@pytest.fixture(scope="module")
def trained(tiny_run):
    task = tiny_run().task()
    for step in range(30):
        task.inner_step(64.0 * step)
    return task.model.module


def test_the_same_seed_gives_the_same_text(trained):
    before = torch.get_rng_state()
    one, other = (generate_tokens(trained, PROMPT, 20, Sampling(seed=3)) for _ in range(2))
    assert one == other
    assert len(one) == 20
    assert generate_tokens(trained, PROMPT, 20, Sampling(seed=4)) != one
    assert torch.equal(torch.get_rng_state(), before)
    assert trained.training


def test_greedy_text_equals_the_uncached_computation(trained):
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(20):
            tokens.append(int(trained(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert generate_tokens(trained, PROMPT, 20, Sampling(temperature=0)) == tokens[len(PROMPT) :]
    assert generate_tokens(trained, PROMPT, 20, Sampling(top_k=1)) == tokens[len(PROMPT) :]


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_every_family_writes_with_its_cache_as_without(architecture):
    """Check windows and positions of all layers: 9 tokens are more than the window of Gemma 3 here."""
    module = build_module(description(architecture, initializer_range=0.3, tie_word_embeddings=False), 5)
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(20):
            tokens.append(int(module(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert len(set(tokens[len(PROMPT) :])) > 1
    assert generate_tokens(module, PROMPT, 20, Sampling(temperature=0)) == tokens[len(PROMPT) :]
    assert len(generate_tokens(module, PROMPT * 4, 30, Sampling())) == 30


def test_text_goes_on_past_the_models_window(trained):
    assert trained.config.max_position_embeddings == 32
    assert len(generate_tokens(trained, PROMPT * 8, 100, Sampling())) == 100


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 8])
def test_what_begins_a_text_stays_when_the_window_is_full(trained, prompt):
    read = []
    hook = trained.register_forward_pre_hook(lambda _, __, given: read.append(given["input_ids"][0]), with_kwargs=True)
    try:
        assert len([*stream_tokens(trained, [1, *prompt], 60, Sampling(), prefix=(1,))]) == 60
    finally:
        hook.remove()
    windows = [ids.tolist() for ids in read if len(ids) > 1]
    assert len(windows) > 2
    assert all(ids[0] == 1 and len(ids) <= 32 for ids in windows)
    assert windows[1][1:] != windows[0][1:]


def test_it_ends_at_the_separator(trained):
    first, second, *_ = generate_tokens(trained, PROMPT, 20, Sampling(temperature=0))
    assert generate_tokens(trained, PROMPT, 20, Sampling(temperature=0), stop=first) == []
    if second != first:
        assert generate_tokens(trained, PROMPT, 20, Sampling(temperature=0), stop=second) == [first]


def test_text_begins_with_the_prompt(trained):
    assert generate_text(trained, ByteTokenizer(), "12 times ", 10, Sampling()).startswith("12 times ")
    assert generate_text(trained, ByteTokenizer(), "", 5, Sampling()).startswith("\n")


@pytest.mark.parametrize("sampling", [Sampling(temperature=5.0, top_k=None), Sampling(temperature=0)])
def test_ids_that_the_tokenizer_does_not_have_are_never_drawn(tiny_run, sampling):
    """Check a model with more ids than its tokenizer, as for speed: training never lowers their probability."""
    module = tiny_run(model__config__vocab_size=320).model().module
    with torch.no_grad():
        module.get_output_embeddings().weight[256:] *= 1000
    assert max(generate_tokens(module, PROMPT, 30, sampling)) >= 256
    assert max(generate_tokens(module, PROMPT, 30, sampling, vocabulary=256)) < 256
    assert generate_text(module, ByteTokenizer(), "12 times ", 30, sampling).startswith("12 times ")


def test_a_prompt_that_the_tokenizer_drops_starts_with_a_separator(tiny_run):
    """Tokenizers that split at white space have no ids for the line end that stands for no prompt."""

    class Dropping(ByteTokenizer):
        def encode_batch(self, texts):
            return [ids[:0] for ids in super().encode_batch(texts)]

    assert generate_text(tiny_run().model().module, Dropping(), "", 5, Sampling()).startswith("\0")


def test_tokens_come_one_by_one_and_the_iterator_may_be_closed(trained):
    trained.train(True)
    ids = stream_tokens(trained, PROMPT, 20, Sampling(seed=3))
    first = next(ids)
    assert torch.is_grad_enabled()
    ids.close()
    assert trained.training
    assert generate_tokens(trained, PROMPT, 20, Sampling(seed=3))[0] == first
    assert list(stream_tokens(trained, PROMPT, 20, Sampling(seed=3), stops={first})) == []


def pieces(text: str, stop: str = "", before: bytes = b"") -> list[str]:
    return list(text_pieces(list(text.encode()), ByteTokenizer(), list(before), stop))


def test_text_comes_as_soon_as_it_is_certain():
    assert pieces("ab") == ["a", "b", ""]
    assert [each for each in pieces("é🙂!") if each] == ["é", "🙂", "!"]
    assert "".join(text_pieces(list(b"a\xf0\x9f"), ByteTokenizer())) == "a\ufffd"  # a character that never ends
    assert "".join(pieces("world", before=b"hello ")) == "world"


def test_text_ends_before_the_stop_which_is_never_shown():
    assert pieces("yes<end>no", "<end>") == ["y", "e", "s", ""]
    assert "".join(pieces("a<e b<en", "<end>")) == "a<e b<en"
    assert pieces("<end>", "<end>") == [""]
    assert "".join(pieces("x", "<end>", before=b"<end>")) == "x"
