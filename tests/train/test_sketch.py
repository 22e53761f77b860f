"""Sketches estimate the distance between two copies of weights."""

from __future__ import annotations

import math

import pytest
import torch

from p2ptrain.base.errors import RemoteError
from p2ptrain.host.sketch import SKETCH_BYTES, distance, sketch


def weights(n: int = 50_000, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("apart", [0.003, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_distance_of_sketches_is_that_of_weights(apart: float, seed: int) -> None:
    mine = weights()
    theirs = mine + apart * weights(seed=1)
    assert distance(sketch(mine, seed), sketch(theirs, seed)) == pytest.approx(apart, rel=0.35)


def test_lies_are_far_and_equal_weights_are_at_nothing() -> None:
    mine = weights()
    assert distance(sketch(mine, 5), sketch(mine.clone(), 5)) == 0.0
    assert distance(sketch(mine, 5), sketch(-mine, 5)) == pytest.approx(2.0)
    assert distance(sketch(mine, 5), sketch(weights(seed=2), 5)) > 1.0
    assert distance(sketch(mine, 5), sketch(mine, 6)) > 1.0  # sketches of different seeds do not compare


@pytest.mark.parametrize("times", [0.5, 1.95])
def test_a_copy_that_was_scaled_is_as_far_whichever_of_the_two_is_ours(times: float) -> None:
    mine = weights()
    for one, other in ((mine, times * mine), (times * mine, mine)):
        assert distance(sketch(one, 1), sketch(other, 1)) == pytest.approx(abs(1 - times) / min(times, 1.0))


def test_pieces_longer_than_a_chunk_are_sketched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.host.sketch.CHUNK", 1000)
    mine = weights(2500)
    changed = mine.clone()
    changed[2400] += 10.0
    assert distance(sketch(mine, 1), sketch(changed, 1)) == pytest.approx(10.0 / float(mine.norm()), rel=0.35)


def test_what_is_no_sketch_is_an_offence_and_nothing_breaks_on_nothing() -> None:
    mine = sketch(weights(), 1)
    with pytest.raises(RemoteError, match="a sketch of 3 bytes"):
        distance(mine, b"abc")
    with pytest.raises(RemoteError, match="is not finite"):
        distance(mine, b"\xff" * SKETCH_BYTES)
    assert math.isfinite(distance(sketch(torch.zeros(10), 1), sketch(torch.zeros(10), 1)))
