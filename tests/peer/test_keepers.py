"""Real keepers on loopback: two keep a half each of a model whose trainers all leave, and a newcomer resumes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from swarm import ENDLESS, Program, Swarm

from p2ptrain import checkpoint
from p2ptrain.swarm import keeping
from peer.cli import export
from peer.cli import peer as peer_command

pytestmark = pytest.mark.net


@dataclass(frozen=True)
class Kept:
    swarm: Swarm
    keepers: list[Program]
    newcomer: Program
    progress: float
    """Tokens of the trainers' last checkpoints, the fewest."""
    fragments: int


def saved(program: Program) -> checkpoint.Checkpoint:
    found = checkpoint.load_latest(program.home / "checkpoints").checkpoint
    assert found is not None, program.output
    return found


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with Swarm(**ENDLESS, outer__fragments=4, outer__fragments_per_exchange=1) as swarm:
        fragments = swarm.signed.manifest.outer.fragments
        swarm.bootstrap()
        trainers = [swarm.peer(name) for name in ("anna", "bert")]
        for each in trainers:
            each.wait_for("exchanged")
            each.give_way()
        half = fragments // 2
        keepers = [
            swarm.peer("low", "--keep", f"0-{half - 1}"),
            swarm.peer("high", "--keep", f"{half}-{fragments - 1}"),
        ]
        for each in keepers:
            each.wait_for("caught up")
            each.wait_for_more("exchanged", 4)
        for each in trainers:
            each.interrupt()
            assert each.end() == 0
        progress = min(float(saved(each).state["progress"]) for each in trainers)
        newcomer = swarm.peer("late")
        newcomer.wait_for("caught up")
        newcomer.wait_for("exchanged")
        for each in (*keepers, newcomer):
            each.interrupt()
            assert each.end() == 0, each.output[-3000:]
        yield Kept(swarm, keepers, newcomer, progress, fragments)


@pytest.mark.lab
def test_the_newcomer_took_its_weights_from_both_keepers(kept: Kept) -> None:
    took = kept.newcomer.events("took weights")[0]
    assert took["donors"] == 2, kept.newcomer.output
    assert took["broke_off"] == 0
    resumed = float(saved(kept.newcomer).state["progress"])
    assert resumed > 0.5 * kept.progress


@pytest.mark.lab
def test_a_keeper_saves_its_fragments_and_nothing_else(kept: Kept) -> None:
    parts = [saved(each) for each in kept.keepers]
    names = [sorted(each.tensors) for each in parts]
    half = kept.fragments // 2
    assert names[0] == sorted(f"kept.{each}" for each in range(half))
    assert names[1] == sorted(f"kept.{each}" for each in range(half, kept.fragments))
    summaries = [json.loads((each.home / "summary.json").read_text()) for each in kept.keepers]
    assert [each["tokens"] for each in summaries] == [0, 0]
    assert summaries[0]["keeps"] == keeping.words(range(half))


@pytest.mark.lab
def test_a_keeper_resumes_from_its_home_alone(kept: Kept) -> None:
    again = kept.swarm.peer("low", link=None)
    again.wait_for("resumed")
    again.wait_for("keeping")
    again.interrupt()
    assert again.end() == 0


@pytest.mark.lab
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep", "1"], "are those of a keeper of fragments 0-"),
        (["--keep", "99"], "this run has only the fragments 0 to"),
        (["--device", "cpu"], "keeps fragments 0-"),
        (["--forget"], "are those of a keeper, which has a part of the model"),
    ],
)
def test_another_start_in_a_keepers_home_is_refused(kept: Kept, words: list[str], said: str) -> None:
    again = kept.swarm.peer("low", *words, link=None)
    assert again.end() != 0
    assert said in again.output
    assert "Traceback" not in again.output


@pytest.mark.lab
def test_a_part_of_a_model_is_not_exported(kept: Kept, tmp_path: Path) -> None:
    result = CliRunner().invoke(export, [str(kept.keepers[0].home), str(tmp_path / "model")])
    assert result.exit_code != 0
    assert "keeps a part of the model" in str(result.exception)


@pytest.mark.parametrize(
    "words",
    [
        ["--keep", "3-1"],
        ["--keep", "x"],
        ["--keep", "0-3", "--devices", "cpu,cpu"],
        ["--keep", "0-3", "--stages", "2"],
        ["--keep", "0-3", "--team", "2", "--at", "127.0.0.1"],
    ],
)
def test_impossible_words_are_refused_before_anything_is_written(tmp_path: Path, words: list[Any]) -> None:
    link = f"p2ptrain://{'a' * 64}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    result = CliRunner().invoke(peer_command, [link, "--home", str(tmp_path / "home"), *words])
    assert result.exit_code != 0
    assert not (tmp_path / "home").exists()
