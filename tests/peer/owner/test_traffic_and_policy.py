"""The month's traffic on disk, and the policy that follows from it, the hour and the owner's commands."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from peer.owner.policy import GIVEN_SHARE, decide
from peer.owner.settings import Settings
from peer.owner.traffic import KEPT_MONTHS, Month, TrafficCount
from peer.participation import Mode

NOVEMBER, DECEMBER = datetime(2026, 11, 30, 23, 59), datetime(2026, 12, 1, 0, 0)


def reopened(home: Path) -> TrafficCount:
    traffic = TrafficCount(home)
    assert traffic.load() == ""
    return traffic


def test_the_count_outlives_the_process(tmp_path: Path) -> None:
    traffic = reopened(tmp_path)
    traffic.add(5, 7, 3, NOVEMBER)
    traffic.add(1, 0, 0, NOVEMBER)
    traffic.save()
    assert reopened(tmp_path).month(NOVEMBER) == Month(6, 7, 3)
    assert reopened(tmp_path).month(NOVEMBER).both == 13


def test_a_new_month_begins_at_nothing_and_the_old_one_stays(tmp_path: Path) -> None:
    traffic = reopened(tmp_path)
    traffic.add(5, 7, 3, NOVEMBER)
    assert traffic.month(DECEMBER) == Month()
    traffic.add(1, 1, 0, DECEMBER)
    traffic.save()
    assert reopened(tmp_path).month(DECEMBER) == Month(1, 1)
    assert reopened(tmp_path).month(NOVEMBER) == Month(5, 7, 3)


def test_a_clock_that_jumps_and_comes_back_finds_its_month(tmp_path: Path) -> None:
    traffic = reopened(tmp_path)
    traffic.add(5, 7, 3, NOVEMBER)
    traffic.add(1, 1, 0, datetime(1970, 1, 1))
    traffic.add(1, 1, 0, datetime(2036, 1, 1))
    assert traffic.month(NOVEMBER) == Month(5, 7, 3)


def test_old_months_are_forgotten(tmp_path: Path) -> None:
    traffic = reopened(tmp_path)
    for month in range(3 * KEPT_MONTHS):
        traffic.add(1, 1, 0, datetime(2000, 1, 1) + month * timedelta(days=31))
    traffic.save()
    assert len(reopened(tmp_path)._months) == KEPT_MONTHS


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"2026-11": 5}',
        '{"2026-11": {"sent_bytes": -1, "received_bytes": 0}}',
        f'{{"2026-11": {{"sent_bytes": {10**400}, "received_bytes": 0}}}}',
        "[" * 100_000,
    ],
    ids=["empty", "list", "number", "negative", "digits", "lists"],
)
def test_a_damaged_count_says_so_and_begins_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "traffic.json").write_text(content)
    traffic = TrafficCount(tmp_path)
    assert traffic.load() == "the file is damaged"
    assert traffic.month(NOVEMBER) == Month()


CAPPED = Settings(monthly_gb=1.0, hours="22:00-07:00")
USED_UP = "this month's traffic is used up, 1.0 GB of 1.0 GB (monthly_gb in settings.toml)"
NIGHT, DAY = datetime(2026, 11, 5, 23, 0), datetime(2026, 11, 5, 12, 0)


@pytest.mark.parametrize(
    ("settings", "paused", "now", "used", "mode", "why"),
    [
        (Settings(), False, DAY, 10**15, Mode.SWARM, ""),
        (CAPPED, False, NIGHT, 10**9 - 1, Mode.SWARM, ""),
        (
            CAPPED,
            False,
            NIGHT,
            10**9,
            Mode.PAUSED,
            USED_UP,
        ),
        (CAPPED, False, DAY, 10**9, Mode.PAUSED, "outside the hours 22:00-07:00 in settings.toml"),
        (CAPPED, True, NIGHT, 10**9, Mode.PAUSED, "requested by its owner"),
    ],
)
def test_the_first_reason_that_speaks_decides(
    settings: Settings, paused: bool, now: datetime, used: int, mode: Mode, why: str
) -> None:
    decision = decide(settings, paused_until=math.inf if paused else None, now=now, month=Month(sent=used))
    assert (decision.mode, decision.why) == (mode, why)


@pytest.mark.parametrize("day", [1, 15, 30])
def test_of_a_budget_others_get_their_share_day_by_day(day: int) -> None:
    now = datetime(2026, 11, day, 12, 0)
    share = math.ceil(GIVEN_SHARE * 10**9 * day / 30)
    settings = Settings(monthly_gb=1.0)
    decisions = [
        decide(settings, paused_until=None, now=now, month=Month(given, 0, given)) for given in (share - 1, share)
    ]
    assert [(each.mode, each.gives) for each in decisions] == [(Mode.SWARM, True), (Mode.SWARM, False)]


@pytest.mark.parametrize(
    ("settings", "paused", "gives"),
    [(Settings(), False, True), (Settings(), True, False), (CAPPED, False, False)],
    ids=["no budget", "paused", "by day"],
)
def test_without_a_budget_others_get_what_they_ask_for_unless_it_rests(
    settings: Settings, paused: bool, gives: bool
) -> None:
    until = math.inf if paused else None
    assert decide(settings, paused_until=until, now=DAY, month=Month(10**15, 0, 10**15)).gives is gives


def test_an_older_file_does_not_tell_what_was_given(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text('{"2026-11": {"sent_bytes": 5, "received_bytes": 7}}')
    assert reopened(tmp_path).month(NOVEMBER) == Month(5, 7, 0)
