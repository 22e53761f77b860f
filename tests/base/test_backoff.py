"""Pauses between retries."""

from itertools import islice

from p2ptrain.base.backoff import backoff


def test_pauses_double_up_to_the_last() -> None:
    assert [*islice(backoff(1.0, 6.0), 5)] == [1.0, 2.0, 4.0, 6.0, 6.0]
    assert [*islice(backoff(30.0, 30.0), 2)] == [30.0, 30.0]
