"""Order of events in the virtual world."""

from __future__ import annotations

from random import Random

from sim.world import World


def test_whatever_is_scheduled_when_comes_in_the_order_of_time_and_then_of_scheduling() -> None:
    world, random, seen = World(), Random(1), []
    expected = []

    def schedule(serial: int) -> None:
        time = world.now + random.choice((0.0, 0.25, 0.5, 1.0, 7.0, 400.0))
        expected.append((time, serial))
        world.at(time, happen, serial)

    def happen(serial: int) -> None:
        seen.append((world.now, serial))
        if len(expected) < 500:
            schedule(len(expected))
            schedule(len(expected))

    schedule(0)
    world.run()
    assert len(seen) >= 500
    assert seen == sorted(expected)


def test_after_a_limit_in_an_empty_time_what_comes_sooner_than_all_else_still_comes_first() -> None:
    world, seen = World(), []
    world.at(100.5, seen.append, "late")
    world.run(until=50.0)
    assert world.now == 50.0
    world.at(100.25, seen.append, "sooner")
    world.at(60.0, seen.append, "soon")
    world.run()
    assert seen == ["soon", "sooner", "late"]


def test_what_is_due_at_no_time_never_comes() -> None:
    world, seen = World(), []
    world.at(float("inf"), seen.append, "never")
    world.after(float("inf"), seen.append, "never")
    world.run()
    assert not seen
    assert world.now == 0.0
