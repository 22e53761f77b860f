"""Impossible numbers end in one clear line at once; diverging numbers are reported as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim import report as reports
from sim.errors import ScenarioError
from sim.scenario_file import changed, parse, read
from sim.simulate import simulate

TIMES = ("arrives_at_s", "arrives_over_s", "leaves_at_s", "stays_s", "latency_s", "step_s")
RATES = ("up_mbit_s", "down_mbit_s")
COUNTS = ("run.outer_steps", "run.points", "outer.inner_steps", "peers.home.count", "learner.parameters")
GOES_TOO_FAR = (
    *(
        f"peers.home.{field}={value}"
        for field in TIMES
        for value in ("1e308", "-1", "inf", "nan", "true", "1" + 400 * "0")
    ),
    *(f"peers.home.{field}={value}" for field in RATES for value in ("1e308", "5e-324", "0", "-1", "inf")),
    *(f"{field}={value}" for field in COUNTS for value in (10**18, "-1", "0", "true", "1.0", "1e300", '"4"')),
    *(f"run.seed={value}" for value in (2**63, -1, "true", "0.5", 4000 * "9")),
    *(f"run.seconds={value}" for value in ("1e308", "0", "inf", "true")),
    "peers.home.step_s=5e-324",
    "peers.home.stays_s=0.5",
    "peers.home.returns_after_s=1e308",
    "peers.home.freezes=[{at_s = 1e308, for_s = 1.0}]",
    f"peers.home.name={100_000 * 'x'}",
    f"outer.recipe={100_000 * 'x'}",
    *(f"learner={{kind = 'quadratic', {field} = 1e30}}" for field in ("noise", "spread", "learning_rate")),
    "learner={kind = 'quadratic', largest_curvature = 1e308, learning_rate = 1e-308}",
    "learner={kind = 'quadratic', smallest_curvature = 5e-324}",
    "learner={kind = 'lm', hidden_size = 10_000_000}",
    "learner={kind = 'lm', hidden_size = 4096, intermediate_size = 16_384, layers = 64}",
    "learner={kind = 'lm', sequence_length = 4096, sequences_per_step = 65_536}",
    "learner={kind = 'lm', curve_sequences = 10_000_000_000}",
)


@pytest.mark.parametrize("change", GOES_TOO_FAR, ids=lambda change: change[:40])
def test_what_goes_too_far_is_told_in_a_short_line(basic: dict[str, Any], change: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse(changed(basic, (change,)))
    section = change.partition("=")[0].partition(".")[0]
    assert caught.value.problem.startswith(section)
    assert all(len(line) < 300 and line.isprintable() for line in caught.value.problem.split("\n"))


@pytest.mark.parametrize("seed", [2**63 - 1, 2**45])
def test_the_largest_seeds_are_seeds(make, seed: int) -> None:
    scenario = make("learner={kind = 'quadratic', parameters = 2048}", f"run.seed={seed}", "run.outer_steps=1")
    assert simulate(scenario).overall.loss is not None


DIVERGING = (
    "outer.recipe=diloco",
    "outer.exchanges_per_step=0",
    "outer.fragments=1",
    "outer.learning_rate=2",
    "outer.momentum=0.9999",
    "run.outer_steps=400",
    "learner={kind = 'quadratic', parameters = 2048, noise = 1e6, learning_rate = 1.9}",
)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_everybody_diverging_is_reported(make, tmp_path: Path, codec: str) -> None:
    made = simulate(make(*DIVERGING, f"codec.gradients={codec}"))
    assert made.ending == "all of them diverged"
    assert made.overall.endings == {"all of them diverged": 6}
    assert (made.overall.loss, made.curve[-1].validation, made.curve[-1].disagreement) == (None, None, None)
    reports.save(made, tmp_path / "r.json")
    assert reports.load(tmp_path / "r.json") == made


def test_endless_files_are_not_read_to_their_end() -> None:
    with pytest.raises(ScenarioError, match="longer than 1,048,576 characters"):
        read(Path("/dev/zero"), ())
