"""Training and held-out sequences share only the token at the block border, and cover the stream."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.split import split_stream


@settings(max_examples=50)
@given(
    tokens=st.integers(200, 60_000),
    sequence_length=st.integers(8, 64),
    fraction=st.floats(0.005, 0.5),
)
def test_no_token_is_both_trained_on_and_held_out(tokens, sequence_length, fraction):
    split = split_stream(tokens, sequence_length, fraction)
    span = sequence_length + 1
    trained = {
        t for i in range(split.train_sequences) for t in range(split.train_start(i), split.train_start(i) + span)
    }
    held = {
        t
        for i in range(split.held_out_sequences)
        for t in range(split.held_out_start(i), split.held_out_start(i) + span)
    }
    assert trained
    assert held
    assert not trained & held
    assert max(trained | held) < tokens


def test_little_is_left_over_and_the_fraction_is_met():
    split = split_stream(5_055_611, 128, 0.05)
    used = (split.train_sequences + split.held_out_sequences) * 128
    assert used > 0.995 * 5_055_611
    assert split.held_out_sequences * 128 == pytest.approx(0.05 * used, rel=0.05)
    assert split.regions == 64


def test_every_predicted_token_is_predicted_once():
    split = split_stream(10_000, 16, 0.1)
    targets = [
        t for i in range(split.train_sequences) for t in range(split.train_start(i) + 1, split.train_start(i) + 17)
    ]
    assert len(targets) == len(set(targets))


def test_held_out_blocks_are_spread_over_the_whole_stream():
    split = split_stream(1_000_000, 64, 0.05)
    starts = [split.held_out_start(i) for i in range(split.held_out_sequences)]
    assert min(starts) < 0.05 * 1_000_000
    assert max(starts) > 0.95 * 1_000_000


def test_a_stream_of_two_sequences_is_enough_and_less_is_not():
    split = split_stream(34, 16, 0.05)
    assert (split.train_sequences, split.held_out_sequences) == (1, 1)
    with pytest.raises(CorpusError, match="too short: 33 tokens"):
        split_stream(33, 16, 0.05)


@pytest.mark.parametrize("index", [-1, 10**9])
def test_an_index_outside_is_refused(index):
    split = split_stream(10_000, 16, 0.1)
    with pytest.raises(IndexError):
        split.train_start(index)
    with pytest.raises(IndexError):
        split.held_out_start(index)
