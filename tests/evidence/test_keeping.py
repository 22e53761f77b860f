"""What is kept of a run: its identity, its file, its headline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench.evidence import fake
from bench.evidence.cells import CENTRAL, Cell, Choice
from bench.evidence.contenders import SWARM
from bench.evidence.headline import headline, times_to
from bench.evidence.identity import NUMERIC_SOURCES, code_digest, cost_digest, numeric_digest, scenario_digest, sources
from bench.evidence.scenario import scenario
from bench.evidence.store import Record, Store

SCENARIO = scenario(Cell(experiment="R1", contender=SWARM, setting=CENTRAL, seed=1), Choice("swarm", 0.7, 0.5))
RECORD = Record(
    name="a", scenario=SCENARIO, headline={"loss": 1.5}, code="1", commit="c", machine="m", date="d", seconds=1.0
)


# --- identity -------------------------------------------------------------------------------------


def test_explanations_change_no_digest_and_code_does() -> None:
    plain = "def half(x):\n    return x / 2\n\nLIMIT = 3\n"
    told = (
        '"""A module."""\n\n# why\ndef half(x):\n    """Half of it."""\n    return x / 2\n\nLIMIT = 3\n"""At most."""\n'
    )
    assert code_digest({"a.py": plain}) == code_digest({"a.py": told})
    assert code_digest({"a.py": plain}) != code_digest({"a.py": plain.replace("2", "3")})
    assert code_digest({"a.py": plain}) != code_digest({"b.py": plain})
    assert code_digest({"a.py": "x = 'text'"}) != code_digest({"a.py": "x = 'other'"})


def test_the_digest_is_over_the_code_that_decides() -> None:
    found = sources(NUMERIC_SOURCES)
    assert {"p2ptrain/outer/step.py", "p2ptrain/swarm/peer.py", "p2ptrain/train/learner.py"} <= set(found)
    assert {
        "p2ptrain/framing.py",
        "p2ptrain/wire.py",
        "p2ptrain/manifest/sources.py",
        "p2ptrain/train/optimizer.py",
    } <= set(found)
    assert found["p2ptrain/data/corpora/shakespeare.txt.xz"].startswith("BYTES = "), "text, by its bytes"
    assert len(numeric_digest()) == len(cost_digest()) == 16
    assert numeric_digest() != cost_digest()


def test_a_scenarios_digest_ignores_the_order_of_fields() -> None:
    assert scenario_digest({"a": 1, "b": {"c": 2, "d": 3}}) == scenario_digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert scenario_digest({"a": 1}) != scenario_digest({"a": 2})
    with pytest.raises(ValueError, match="not JSON compliant"):
        scenario_digest({"a": math.nan})


# --- the store ------------------------------------------------------------------------------------


def test_a_record_comes_back(tmp_path: Path) -> None:
    Store(tmp_path).keep(RECORD)
    found = Store(tmp_path).find(SCENARIO)
    assert found == RECORD
    assert found is not None
    assert found.loss == 1.5
    assert Store(tmp_path).find({**SCENARIO, "codec": {}}) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 0}', b'{"version": 1, "name": "half"}'])
def test_a_file_that_is_torn_or_of_another_version_is_no_record(tmp_path: Path, content: bytes) -> None:
    Store(tmp_path).keep(RECORD)
    next(tmp_path.glob("*.json")).write_bytes(content)
    assert Store(tmp_path).find(SCENARIO) is None


# --- the headline ---------------------------------------------------------------------------------


def report(**changes: Any) -> dict[str, Any]:
    return {**fake.simulate(SCENARIO), **changes}


def test_the_headline_by_hand() -> None:
    made = report()
    last = made["curve"][-1]
    found = headline(made)
    assert found["loss"] == pytest.approx(last["validation"], rel=1e-5)
    assert found["averaged_loss"] == pytest.approx(last["validation_of_mean"], rel=1e-5)
    assert found["bits_per_parameter"] == 32
    assert found["payload_bits_per_parameter"] == pytest.approx(0.98 * 32)
    assert found["exchanges_per_outer_step"] == 1
    assert (found["exchanges"], found["exchanges_failed"], found["exchanges_declined"]) == (300, 3, 10)
    assert found["directory_bytes_per_peer"] == 2e4
    assert "diverged" not in found


def test_a_run_that_diverged_says_so() -> None:
    found = headline(report(curve=[{**report()["curve"][-1], "validation": None}]))
    assert found["diverged"] == 1
    assert "loss" not in found


def test_counting_learners_have_no_loss_and_have_not_diverged() -> None:
    counted = report(scenario={**SCENARIO, "learner": {"kind": "bytes"}}, curve=[])
    assert "diverged" not in headline(counted)


def test_times_are_read_between_the_points() -> None:
    assert dict(times_to([(10.0, 3.5), (20.0, 2.5), (30.0, 2.5)])) == {
        3.0: pytest.approx(15.0),
        2.75: pytest.approx(17.5),
        2.5: pytest.approx(20.0),
    }
    assert dict(times_to([(10.0, 2.6)])) == {3.0: 10.0, 2.75: 10.0}
    assert dict(times_to([])) == {}


def test_a_loss_that_rises_again_was_still_reached() -> None:
    assert dict(times_to([(1.0, 3.2), (2.0, 2.9), (3.0, 3.3)]))[3.0] == pytest.approx(1 + 0.2 / 0.3)


def test_the_last_point_is_no_rung_as_it_is_judged_on_another_part() -> None:
    def point(time_s: float, loss: float) -> dict[str, Any]:
        return {**report()["curve"][-1], "time_s": time_s, "validation": loss, "groups": {}}

    found = headline(report(curve=[point(1.0, 2.9), point(2.0, 2.6), point(3.0, 2.4)]))
    assert {name for name in found if name.startswith("seconds_to:")} == {"seconds_to:3.0", "seconds_to:2.75"}
    assert found["loss"] == 2.4
    assert headline(report(curve=[point(3.0, 2.9)]))["seconds_to:3.0"] == 3.0
