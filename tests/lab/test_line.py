"""Packets on a link: delayed, in order, lost at random, with a bounded queue."""

from __future__ import annotations

import random

from lab import line
from lab.line import Direction


def test_packets_come_out_later_and_in_order() -> None:
    way = Direction(0.1, 0.0, random.Random(1).random)
    way.put(b"one", 5.0)
    way.put(b"two", 5.05)
    assert way.next_at == 5.1
    assert way.take(5.09) == []
    assert way.take(5.1) == [b"one"]
    assert way.take(9.0) == [b"two"]
    assert way.next_at is None


def test_the_seed_decides_what_is_lost() -> None:
    def survivors(seed: int) -> list[bytes]:
        way = Direction(0.0, 0.25, random.Random(seed).random)
        for number in range(1000):
            way.put(number.to_bytes(2), 0.0)
        arrived = way.take(0.0)
        assert way.dropped + len(arrived) == 1000
        assert 200 < way.dropped < 300
        return arrived

    assert survivors(3) == survivors(3) != survivors(4)


def test_the_queue_is_bounded() -> None:
    way = Direction(1.0, 0.0, random.Random(1).random)
    packet = bytes(1_000_000)
    for _ in range(100):
        way.put(packet, 0.0)
    assert way.dropped == 100 - line.MOST_WAITING_BYTES // len(packet)
    assert len(way.take(1.0)) == 32
    way.put(packet, 1.0)  # space again
    assert len(way.take(2.0)) == 1
