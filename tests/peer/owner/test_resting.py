"""When a peer rests for other uses of its machine: readings, settings and a clock in, a reason or none out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.owner.resting import CALM_S, COOLED_CELSIUS, SENSED, STALE_S, Readings, RestRule, current
from peer.owner.settings import Settings

ALL = Settings(
    pause_while=["Steam", "blender"], pause_while_active_minutes=10, pause_on_battery=True, pause_above_celsius=80.0
)
CALM = Readings(on_battery=False, celsius=60.0, is_active=False)


def reason(rule: RestRule, settings: Settings, readings: Readings, now: float) -> str:
    return rule.reason(settings, replace(readings, at=now), now)


@pytest.mark.parametrize(
    ("readings", "said"),
    [
        (CALM, ""),
        (Readings(), ""),  # nothing is known yet, or ever
        (replace(CALM, programs=frozenset({"Steam"})), "Steam is running (pause_while in settings.toml)"),
        (replace(CALM, on_battery=True), "this computer runs on its battery (pause_on_battery in settings.toml)"),
        (
            replace(CALM, celsius=80.5),
            "the computer has 80 °C; training resumes at 70 °C (pause_above_celsius in settings.toml)",
        ),
        (
            replace(CALM, is_active=True),
            "somebody used this computer in the last 10 minutes (pause_while_active_minutes in settings.toml)",
        ),
    ],
)
def test_each_reading_has_its_reason_and_only_if_it_was_asked_for(readings: Readings, said: str) -> None:
    assert reason(RestRule(), ALL, readings, 1000.0) == said
    assert reason(RestRule(), Settings(), readings, 1000.0) == ""


def test_a_rest_ends_a_minute_after_its_reason() -> None:
    rule, now = RestRule(), 1000.0
    busy = replace(CALM, on_battery=True)
    why = reason(rule, ALL, busy, now)
    assert reason(rule, ALL, CALM, now + CALM_S - 1) == why
    assert reason(rule, ALL, busy, now + CALM_S) == why
    assert reason(rule, ALL, CALM, now + 2 * CALM_S - 1) == why
    assert reason(rule, ALL, CALM, now + 2 * CALM_S) == ""


def test_an_edit_counts_at_once() -> None:
    rule, now = RestRule(), 1000.0
    assert reason(rule, ALL, replace(CALM, programs=frozenset({"Steam"})), now)
    edited = ALL.model_copy(update={"pause_while": ["blender"]})
    assert reason(rule, edited, replace(CALM, programs=frozenset({"Steam"})), now + 1) == ""


def test_heat_must_go_some_way_before_training_resumes() -> None:
    rule, now = RestRule(), 1000.0
    for celsius, rests in ((80.0, False), (80.1, True), (75.0, True), (80.0 - COOLED_CELSIUS, False), (80.0, False)):
        now += CALM_S
        assert bool(reason(rule, ALL, replace(CALM, celsius=celsius), now)) is rests


def test_the_minutes_count_from_the_last_use() -> None:
    rule, now = RestRule(), 1000.0
    assert reason(rule, ALL, replace(CALM, is_active=True), now)
    assert reason(rule, ALL, CALM, now + 599)
    assert reason(rule, ALL, CALM, now + 599 + CALM_S) == ""
    alone = RestRule()
    assert reason(alone, ALL, CALM, 0.0) == ""  # nobody has been here since the start


def test_readings_of_sensors_that_are_stuck_do_not_count() -> None:
    rule, now = RestRule(), 1000.0
    hot = replace(CALM, celsius=90.0, at=now)
    assert rule.reason(ALL, current(hot, ALL, now + STALE_S), now + STALE_S)
    later = now + STALE_S + CALM_S
    assert rule.reason(ALL, current(hot, ALL, later), later) == ""
    assert current(hot, Settings(), later).faults == {}
    assert current(hot, ALL, later).faults.keys() == set(SENSED)


def test_every_setting_that_needs_the_sensors_is_listed() -> None:
    assert {each for each in Settings.model_fields if each.startswith("pause_")} == set(SENSED)
