"""Figures of a comparison over home lines, from made-up logs."""

import math
from typing import Any

import pytest

from bench.rivals.cases import RivalCase, RivalRecord
from bench.rivals.readings import figures, notes_of
from bench.rivals.table import common, lines, markdown, merged

CASE = RivalCase("swarm", "demo", 3, 1)
ZERO, KILLED, CAME, ENDED = 1000.0, 1090.0, 1135.0, 1195.0


def record() -> RivalRecord:
    traffic = {f"peer-{number}": [(ZERO + at, 1000 * at) for at in range(0, 200, 10)] for number in (1, 2, 3)}
    return RivalRecord(CASE, ZERO, "peer-3", KILLED, "newcomer", CAME, ENDED, traffic)


def notes(until: float, silent: tuple[float, float] = (0.0, 0.0)) -> list[dict[str, Any]]:
    """Return notes two seconds apart: ten outer steps, 2,000 tokens, losses that fall from 4 by 0.01 a second."""
    times = [ZERO + 2 * number for number in range(int((until - ZERO) / 2))]
    return [
        {
            "kind": "progress",
            "time": at,
            "step": 5 * (at - ZERO),
            "tokens": 1000 * (at - ZERO),
            "loss": 4 - 0.01 * (at - ZERO),
        }
        for at in times
        if not silent[0] <= at < silent[1]
    ]


def read(survivors_silence: tuple[float, float] = (0.0, 0.0), newcomer: list[dict[str, Any]] | None = None) -> Any:
    seen = {"peer-1": notes(ENDED), "peer-2": notes(ENDED, survivors_silence), "peer-3": notes(KILLED + 2)}
    stayed = {"val_loss_last": 2.0, "blocked_fraction": 0.01}
    summaries = {"peer-1": stayed, "peer-2": {"val_loss_last": 3.0, "blocked_fraction": 0.25}}
    return figures(record(), {**seen, "newcomer": newcomer or []}, summaries)


def test_what_was_sent_and_done_while_all_was_calm() -> None:
    found = read()
    assert found["bytes_per_outer_step"] == pytest.approx(90_000 / (5 * 90))
    assert found["outer_steps_per_minute"] == pytest.approx(5 * 90 / 1.5)
    assert found["tokens_per_s"] == pytest.approx(1000)
    assert (found["held_out_loss"], found["blocked_share"]) == (2.5, 0.25)


def test_a_stall_is_the_longest_silence_after_the_kill_beyond_the_usual_one() -> None:
    assert read()["stall_s"] == pytest.approx(0.0)
    assert read((KILLED + 2, KILLED + 20))["stall_s"] == pytest.approx(18.0)
    assert read((KILLED - 60, KILLED - 40))["stall_s"] == pytest.approx(0.0), "it was before the kill"


def test_who_never_trains_again_stalls_to_the_end_of_the_window() -> None:
    assert read((KILLED, math.inf))["stall_s"] == pytest.approx(40.0, abs=2.5)


def test_a_newcomer_trains_when_it_has_the_others_weights() -> None:
    early = {"kind": "progress", "time": CAME + 5, "step": 0, "tokens": 10}
    caught_up = {"kind": "caught up", "time": CAME + 8}
    late = {**early, "time": CAME + 11}
    assert read(newcomer=[early, caught_up, late])["newcomer_s"] == pytest.approx(11.0)
    assert read(newcomer=[early, late])["newcomer_s"] is None
    assert read(newcomer=[early, caught_up])["newcomer_s"] is None


def test_seconds_to_a_loss_are_the_end_of_the_first_window_that_is_as_low() -> None:
    found = read()
    assert found["seconds_to:3.5"] == pytest.approx(60.0)
    assert "seconds_to:1.8" not in found


def test_an_event_log_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "started", "time": 1}\n{"kind": "prog', encoding="utf-8")
    assert notes_of(tmp_path) == [{"kind": "started", "time": 1}]
    assert notes_of(tmp_path / "nobody") == []


def test_all_are_compared_at_a_loss_that_all_have_reached() -> None:
    fast = {"case": {"rival": "swarm", "size": "demo", "peers": 4, "seed": 1}, "seconds_to:3": 20, "seconds_to:2.5": 40}
    slow = {"case": {**fast["case"], "rival": "averager"}, "seconds_to:3": 90}
    assert common([fast, slow]) == 3.0
    assert common([fast, {"case": slow["case"]}]) is None
    assert [(line[1], line[6]) for line in lines([slow, fast])] == [("swarm", "3: 20"), ("averager", "3: 90")]


def test_seeds_are_a_mean_and_a_spread_and_what_is_missing_is_said() -> None:
    case = {"rival": "swarm", "size": "demo", "peers": 4}
    runs = [{"case": {**case, "seed": seed}, "stall_s": stall} for seed, stall in ((1, 1.0), (2, 3.0))]
    [line] = lines(runs)
    assert line[8] == "2.0 ± 1.4"
    [line] = lines([*runs, {"case": {**case, "seed": 3}, "stall_s": None}])
    assert line[8] == "2.0 ± 1.4 (2 of 3 runs)"


def test_a_document_says_of_which_machine_and_code_each_seed_is() -> None:
    def run(rival: str, seed: int, commit: str) -> dict[str, Any]:
        environment = {"machine": "an abacus", "date": "2026-01-02T03:04:05+00:00", "commit": commit}
        case = {"rival": rival, "size": "demo", "peers": 4, "seed": seed}
        return {"case": case, "environment": environment, "stall_s": 1.0}

    shown = markdown([run("swarm", 2, "bbb"), run("swarm", 1, "aaa"), run("diloco", 1, "aaa")])
    assert shown[:3] == [
        "- seed 1: an abacus; 2026-01-02; commit aaa",
        "- seed 2: an abacus; 2026-01-02; commit bbb",
        "",
    ]
    assert [row.split(" | ")[:2] for row in shown[5:]] == [["| demo, 4", "swarm"], ["| demo, 4", "diloco"]]


def test_what_was_run_again_takes_the_place_of_what_was_known() -> None:
    old, other = {"case": {"seed": 1}, "stall_s": 1.0}, {"case": {"seed": 2}}
    new = {"case": {"seed": 1}, "stall_s": 2.0}
    assert merged([old, other], [new]) == [other, new]
