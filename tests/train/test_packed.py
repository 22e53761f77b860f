"""Training on packed dialogues: none attends to another, and answers alone are predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from families import DESCRIPTIONS, description
from packed import LENGTHS, PADDING, codes, packed_corpus
from staged_rank import equal_cut
from test_stages import gradients

from p2ptrain.data.tokenizer import ByteTokenizer
from p2ptrain.tokens.packing import IGNORED, decoded_rows
from p2ptrain.train import generate
from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.model import build_module, flat_model, summed_loss
from p2ptrain.train.sequence_parts import parts_of, predicted_count
from p2ptrain.train.staged import StageModule
from p2ptrain.train.stages import stage_model

CPU = torch.device("cpu")
TOKENS = 16
ALL = pytest.mark.parametrize("architecture", DESCRIPTIONS)


def batch() -> torch.Tensor:
    return torch.from_numpy(np.stack(decoded_rows(codes()), axis=1))


@pytest.fixture
def packed_run(tiny_run):
    run = tiny_run()
    return replace(run, corpus=packed_corpus(TOKENS))


def alone(row: torch.Tensor) -> list[torch.Tensor]:
    """Return the inputs of each dialogue of a row [3, T], without padding."""
    inputs, _, positions = row
    starts = [*(positions == 0).nonzero().flatten().tolist(), TOKENS]
    parts = [inputs[begin:end] for begin, end in pairwise(starts)]
    return [part for part in parts if part[0] != PADDING]


@ALL
def test_a_packed_dialogue_has_the_logits_that_it_has_alone(architecture):
    module = build_module(description(architecture), 1)
    module.requires_grad_(False)
    for parameter in module.parameters():
        parameter.mul_(3)  # attention that prefers some tokens
    parts = parts_of(batch())
    together = module(input_ids=parts.inputs, use_cache=False, **parts.arguments).logits
    compared = 0
    for row, logits in zip(batch(), together, strict=True):
        at = 0
        for ids in alone(row):
            expected = module(input_ids=ids[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits[at : at + len(ids)], expected, rtol=1e-4, atol=1e-4)
            at += len(ids)
            compared += 1
    assert compared == len(LENGTHS)
    ignoring = module(input_ids=parts.inputs, use_cache=False).logits
    assert not torch.allclose(ignoring, together, rtol=1e-3, atol=1e-3)


@ALL
def test_stages_of_packed_dialogues_are_the_whole_model(architecture):
    shape = description(architecture)
    whole = flat_model(shape, 1, CPU)
    models = [stage_model(shape, 1, CPU, stage) for stage in equal_cut(2, 2)]
    parts = parts_of(batch())
    hidden = parts.inputs
    for model in models:
        hidden = StageModule(model, None)(hidden, parts.positions)
    expected = whole.module.base_model(input_ids=parts.inputs, use_cache=False, **parts.arguments).last_hidden_state
    assert torch.equal(hidden, expected)


def test_answers_alone_are_predicted():
    module = build_module(description("LlamaForCausalLM"), 1)
    rows = batch()
    summed_loss(module, rows, None).backward()
    labels = rows[:, 1]
    logits = module(input_ids=rows[:, 0], position_ids=rows[:, 2], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(summed_loss(module, rows, None), expected)
    gradient = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    expected.backward()
    for found, parameter in zip(gradient, module.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5)
    assert predicted_count(rows) == sum(length - length // 2 for length in LENGTHS) == int((labels != IGNORED).sum())


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_a_step_takes_the_mean_over_its_answers(packed_run, micro_batch, monkeypatch):
    task = packed_run.task(micro_batch=micro_batch)
    rows = task._batches.at(0).sequences
    expected = packed_run.model()
    loss = summed_loss(expected.module, rows, None) / predicted_count(rows)
    loss.backward()
    taken: list[torch.Tensor] = []
    clip = task._clip

    def clipped() -> torch.Tensor:
        taken.append(task._gradient.clone())
        return clip()

    monkeypatch.setattr(task, "_clip", clipped)
    result = task.inner_step(0)
    torch.testing.assert_close(result.loss, loss.item(), rtol=1e-5, atol=0)
    torch.testing.assert_close(taken[0], gradients(expected), rtol=1e-3, atol=1e-6)
    assert result.tokens == packed_run.manifest.training.tokens_per_step


def test_rows_without_answers_teach_nothing(packed_run):
    task = packed_run.task()
    rows = batch()
    rows[:, 1] = IGNORED
    assert float(task._backward(rows[:4])) == 0.0
    assert not task._gradient.any()


def test_the_held_out_loss_is_a_mean_over_answers(packed_run):
    module = packed_run.model().module
    found = validation_loss(module, packed_run.corpus, 10**6)
    rows = torch.cat(list(packed_run.corpus.validation_batches(10**6, 3)))
    expected = summed_loss(module, rows, None).item() / predicted_count(rows)
    assert found.value == pytest.approx(expected, rel=1e-6)
    assert found.tokens == len(rows) * TOKENS


def test_plain_text_alone_is_compiled(packed_run):
    task: LanguageModelTask = packed_run.task()
    with pytest.raises(CompiledPassError, match="this run's corpus has dialogues"):
        task.pass_shape(packed_run.manifest.model)


def test_a_sample_answers_a_held_out_dialogue(packed_run):
    prompt = packed_run.corpus.prompt_ids()
    text = generate.sample_text(packed_run.model().module, ByteTokenizer(), prompt, "", 4)
    assert text.startswith(ByteTokenizer().decode(prompt))


class TurnTokenizer(ByteTokenizer):
    """Bytes, of which 7 is the special token ``<end>``, which is not the separator."""

    special_tokens = ("<end>",)

    def encode_marked(self, texts):
        return super().encode_marked([text.replace("<end>", "\7") for text in texts])


@pytest.mark.parametrize(
    ("tokenizer", "written", "end_of_turn"),
    [
        (ByteTokenizer(), b"yes<end>no", "<end>"),
        (TurnTokenizer(), b"yes\7no", "<end>"),
        (ByteTokenizer(), b"yes\0no", "<end>"),
        (ByteTokenizer(), b"yes\0no", ""),
    ],
)
def test_a_sample_ends_where_the_turn_ends(packed_run, tokenizer, written, end_of_turn, monkeypatch):
    """Check an end of turn that is text, one that is a token, and the separator."""
    ids, prompt = iter(written), packed_run.corpus.prompt_ids()
    monkeypatch.setattr(generate, "_draw", lambda *_: next(ids))
    text = generate.sample_text(packed_run.model().module, tokenizer, prompt, end_of_turn, len(written))
    assert text == tokenizer.decode(prompt) + "yes"
