"""The verdict on a testnet, without processes or torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from peer.testnet.plan import trainer
from peer.testnet.report import (
    Measured,
    TestnetReport,
    comparison,
    figures_of,
    summary,
    table,
)
from peer.testnet.runner import Ending

FIGURES: dict[str, Any] = {
    "id": "12D3KooWa",
    "val_loss_first": 5.5,
    "val_loss_last": 2.0,
    "tokens": 1000,
    "tokens_per_s": 100.0,
    "exchanges_ok": 12,
    "exchanges_failed": 1,
    "sent_bytes": 10_000,
    "received_bytes": 10_000,
    "blocked_fraction": 0.01,
    "outer_steps": 30,
    "finished": True,
    "why": "the run's end",
}


PEERS = dict.fromkeys(("peer-1", "peer-2", "peer-3"), FIGURES)
SOLO = {"solo": FIGURES | {"exchanges_ok": 0, "val_loss_last": 2.5}}
ENDING = Ending({"peer-1": 0, "peer-2": 0, "peer-3": 0, "solo": 0}, (), False, 60.0)
MEASURED = Measured(1.9, 0.015, 0.002, "To be")
GOOD = TestnetReport(PEERS, SOLO, ENDING, MEASURED, "", 1)

PROMISED_KEYS = {
    "peers",
    "averaged_val_loss",
    "solo_val_loss",
    "disagreement",
    "final_disagreement",
    "wall_s",
    "sample",
}


def with_peer_2(**changes: object) -> TestnetReport:
    return replace(GOOD, peers=PEERS | {"peer-2": FIGURES | changes})


def shown(report: TestnetReport) -> str:
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table(report))
    return capture.get()


def test_a_swarm_that_learned_passes() -> None:
    assert GOOD.failures == []
    assert "(ratio 0.760)" in comparison(GOOD)[0]
    assert replace(GOOD, solo={}).failures == []


def test_training_alone_is_a_failure_however_good_the_loss() -> None:
    assert with_peer_2(exchanges_ok=0).failures == ["peer-2 made no exchange: it trained alone"]


@pytest.mark.parametrize("last", [5.5, 5.4, 6.0, None])
def test_a_peer_that_did_not_learn_is_a_failure(last: float | None) -> None:
    (failure,) = with_peer_2(val_loss_last=last).failures
    assert failure.startswith("peer-2 did not learn: its held-out loss went from 5.5 to ")


def test_the_solo_run_must_learn_too_but_exchanges_nothing() -> None:
    lazy = {"solo": SOLO["solo"] | {"val_loss_last": 5.5}}
    (failure,) = replace(GOOD, solo=lazy).failures
    assert failure.startswith("solo did not learn")


@pytest.mark.parametrize(("status", "said"), [(1, "ended with status 1"), (-9, "ended with status -9")])
def test_a_crash_is_a_failure(status: int, said: str) -> None:
    ending = replace(ENDING, statuses={**ENDING.statuses, "peer-2": status})
    assert replace(GOOD, ending=ending).failures == [f"peer-2 {said}"]


def test_a_crash_that_ended_the_testnet_is_told_once() -> None:
    trouble = "peer-2 ended with status 1; the end of output.log:\nboom"
    ending = replace(ENDING, statuses={**ENDING.statuses, "peer-2": 1}, troubles=(trouble,))
    peers = PEERS | {"peer-2": None, "peer-3": FIGURES | {"finished": False}}
    assert replace(GOOD, ending=ending, peers=peers).failures == [trouble]


def test_a_missing_summary_is_a_failure() -> None:
    report = replace(GOOD, peers=PEERS | {"peer-3": None})
    assert report.failures == ["peer-3 left no summary.json"]
    assert "?" in shown(report)


def test_a_peer_that_stops_early_is_a_failure_unless_it_was_asked_to() -> None:
    early = dict.fromkeys(PEERS, FIGURES | {"finished": False, "why": "stopped by its owner"})
    assert replace(GOOD, peers=early).failures == [
        f"peer-{number} stopped before the run's end: stopped by its owner" for number in (1, 2, 3)
    ]
    cut = replace(GOOD, peers=early, ending=replace(ENDING, cut_short=True))
    assert cut.failures == []
    assert "Cut short" in comparison(cut)[-1]
    assert "in the same time" in comparison(cut)[0]


def test_the_report_says_how_much_sooner_the_swarm_ends() -> None:
    """Check three peers that train for 10, 10 and 20 s."""
    report = replace(GOOD, peers=PEERS | {"peer-1": FIGURES | {"tokens_per_s": 50.0}})
    assert "trained for 20.0 s" in comparison(report)[1]
    assert "would need 30.0 s" in comparison(report)[1]
    missing = replace(report, peers=PEERS | {"peer-1": None})
    assert "trained for" not in "".join(comparison(missing))


def test_cut_short_excuses_neither_silence_nor_laziness() -> None:
    report = replace(with_peer_2(exchanges_ok=0, val_loss_last=5.5), ending=replace(ENDING, cut_short=True))
    assert len(report.failures) == 2


def test_an_average_that_could_not_be_measured_is_a_failure() -> None:
    (failure,) = replace(GOOD, measured=None, unmeasured="peer-1 holds no complete checkpoint.").failures
    assert "peer-1 holds no complete checkpoint." in failure
    assert comparison(replace(GOOD, measured=None)) == []


def test_the_summary_has_the_promised_keys() -> None:
    document = summary(GOOD)
    assert document.keys() >= PROMISED_KEYS
    assert len(document["peers"]) == 3
    assert document["peers"][0] == FIGURES
    assert document["passed"]
    assert (document["averaged_val_loss"], document["solo_val_loss"]) == (1.9, 2.5)


def test_the_summary_is_json_whatever_happened() -> None:
    broken = replace(with_peer_2(val_loss_last=None), measured=None, solo={})
    document = json.loads(json.dumps(summary(broken), allow_nan=False))
    assert document["peers"][1]["val_loss_last"] is None
    assert document["averaged_val_loss"] is None
    assert not document["passed"]
    assert document["failures"]


def test_a_trainers_summary_is_read(tmp_path: Path) -> None:
    peer = trainer(tmp_path, "peer-1")
    peer.home.summary.write_text(json.dumps({**FIGURES, "val_loss_last": None, "surprise": 1}))
    assert figures_of([peer]) == {"peer-1": FIGURES | {"val_loss_last": None}}


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"finished": true, "why": ""}'])
def test_a_missing_or_torn_summary_counts_as_none(text: str | None, tmp_path: Path) -> None:
    peer = trainer(tmp_path, "peer-1")
    if text is not None:
        peer.home.summary.write_text(text)
    assert figures_of([peer]) == {"peer-1": None}


def test_the_table_shows_everyone() -> None:
    text = shown(GOOD)
    assert all(name in text for name in ("peer-1", "peer-2", "peer-3", "solo"))
    assert "5.500" in text
    assert "10.0 kB" in text
    assert "1.00%" in text
    large = {"tokens": 1_234_567, "tokens_per_s": 123_456.0, "sent_bytes": 123_400_000, "exchanges_ok": 123_456}
    row = next(line for line in shown(replace(GOOD, peers={"peer-64": FIGURES | large})).split("\n") if "64" in line)
    assert " ".join(row.split()) == "peer-64 5.500 2.000 1,234,567 123,456 123456 1 123.4 MB 10.0 kB 1.00%"
