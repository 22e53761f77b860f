"""Loss of any text: each token is predicted once, from the tokens before it in its window, as a plain loop does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.train.text_loss import TextLoss, WindowRule, text_loss


def pieces(ids: np.ndarray, size: int) -> list[np.ndarray]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


CUTS = [
    WindowRule.of(8),
    WindowRule.of(8, 7),
    WindowRule.of(8, 3),
    WindowRule.of(2, 1),
    WindowRule.of(8, 1),
    WindowRule.of(8, prefix=(99,)),
    WindowRule.of(8, 3, (99,)),
    WindowRule.of(2, 1, (99,)),
]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9, 17, 50])
def test_each_token_is_predicted_once(tokens: int, cut: WindowRule, chunk: int) -> None:
    length, prefix = cut.length, cut.prefix
    windows = list(cut.windows(pieces(np.arange(tokens, dtype=np.uint8), chunk)))
    predicted = [each for window in windows for each in window.ids[len(window.ids) - window.predicted :].tolist()]
    assert predicted == list(range(0 if prefix else 1, tokens))
    for window in windows:
        assert len(window.ids) - 1 <= length
        body = window.ids[len(prefix) :].tolist()
        assert tuple(window.ids[: len(prefix)].tolist()) == prefix
        assert body == list(range(body[0], body[0] + len(body)))
    for window in windows[1:]:  # the first predicted token has what the cut promises before it
        assert len(window.ids) - window.predicted - len(prefix) == cut.context


@pytest.mark.parametrize("rule", [rule for rule in CUTS if rule.prefix])
def test_a_document_that_begins_a_window_has_its_prefix_once(rule: WindowRule) -> None:
    ids = np.asarray([99, *range(20), 98, 99, *range(20, 26), 98], dtype=np.uint8)
    windows = list(rule.windows(pieces(ids, 5)))
    predicted = [each for window in windows for each in window.ids[len(window.ids) - window.predicted :].tolist()]
    assert predicted == ids[1:].tolist()
    for window in windows:
        assert window.ids[0] == 99
        assert window.ids[1] != 99
        assert len(window.ids) <= rule.length + 1


@pytest.mark.parametrize(("length", "stride"), [(32, None), (16, None), (32, 8), (20, 19)])
def test_the_loss_is_that_of_a_plain_loop(tiny_run: Any, length: int, stride: int | None) -> None:
    module = tiny_run().model().module
    ids = np.frombuffer(b"It was the best of times, it was the worst of times. " * 9, dtype=np.uint8)
    module.train(True)
    before = torch.get_rng_state()
    found = text_loss(module, WindowRule.of(length, stride).windows(pieces(ids, 100)))
    assert module.training
    assert torch.equal(torch.get_rng_state(), before)
    total, step, at = 0.0, stride or length, 1
    first = True
    while at < len(ids):
        count = min(length if first else step, len(ids) - at)
        context = 1 if first else length + 1 - step
        row = torch.tensor(ids[at - context : at + count].astype(np.int64))[None]
        with torch.no_grad():
            logits = module(row[:, :-1]).logits[0, -count:]
        total += float(torch.nn.functional.cross_entropy(logits, row[0, -count:], reduction="sum"))
        at, first = at + count, False
    assert found.tokens == len(ids) - 1
    assert found.nats == pytest.approx(total, rel=1e-6)


def test_reading_stops_when_it_is_told_to(tiny_run: Any) -> None:
    seen: list[tuple[int, int]] = []

    def goes_on(read: int, wanted: int) -> bool:
        seen.append((read, wanted))
        return False

    module = tiny_run(model__config__vocab_size=131_072).model().module  # a window is more than BATCH_LOGITS
    found = text_loss(module, WindowRule.of(8).windows([np.arange(100)]), goes_on, 99)
    assert seen == [(8, 99)]
    assert found.tokens == 8


def test_units() -> None:
    found = TextLoss(100 * math.log(2), 50)
    assert found.per_token == pytest.approx(2 * math.log(2))
    assert found.perplexity == pytest.approx(4)
    assert found.bits_per_byte(200) == pytest.approx(0.5)
    assert found.bits_per_byte(0) is None
    assert TextLoss(1e9, 1).perplexity == math.inf
