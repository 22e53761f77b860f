"""Checkpoints that version 0.1 saved in parts; ``tests/old_team`` has some of it, and what one process saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError
from peer.home import Home
from peer.old_team import convert, main

SAVED = Path(__file__).parents[1] / "old_team"
STEP = "step-00000007"


def homes(folder: Path, *names: str) -> list[Home]:
    for name in names:
        shutil.copytree(SAVED / name, folder / name / "checkpoints")
    return [Home(folder / name) for name in names]


@pytest.mark.parametrize("names", [("team",), ("leader", "other")])
def test_what_ranks_saved_becomes_bit_for_bit_what_one_process_saves(tmp_path: Path, names: tuple[str, ...]) -> None:
    first, *_ = given = homes(tmp_path, *names)
    with pytest.raises(HomeError, match=r"of several devices.*\n.*-m peer\.old_team .*"):
        checkpoint.load_latest(first.checkpoints)
    done = CliRunner().invoke(main, [str(home.path) for home in given])
    assert done.exit_code == 0, done.output
    assert STEP in done.output
    plain, found = (checkpoint.load_latest(folder).checkpoint for folder in (SAVED / "plain", first.checkpoints))
    assert plain is not None
    assert found is not None
    kept = {"versions", "digest"}
    assert {k: v for k, v in found.state.items() if k not in kept} == {
        k: v for k, v in plain.state.items() if k not in kept
    }
    file = "tensors.safetensors"
    assert (found.path / file).read_bytes() == (plain.path / file).read_bytes()
    assert [each.name for each in first.checkpoints.iterdir()] == [STEP]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("leader",), "Of the 3 files of this checkpoint 2 are there"),
        (("other", "leader"), "Name the home of the peer first"),
        (("plain",), "is whole in one file"),
    ],
)
def test_what_is_not_whole_is_one_error_and_stays(tmp_path: Path, names: tuple[str, ...], says: str) -> None:
    given = homes(tmp_path, *names)
    before = sorted(path.name for path in given[0].checkpoints.rglob("*"))
    with pytest.raises(HomeError, match=says):
        convert(given)
    assert sorted(path.name for path in given[0].checkpoints.rglob("*")) == before


def test_a_damaged_part_and_another_step_are_errors(tmp_path: Path) -> None:
    leader, other = homes(tmp_path, "leader", "other")
    (part,) = (other.checkpoints / STEP).glob("*.safetensors")
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(HomeError, match=f"{part.name} does not match its digest"):
        convert([leader, other])
    (other.checkpoints / STEP).rename(other.checkpoints / "step-00000008")
    with pytest.raises(HomeError, match="no checkpoint that is in each"):
        convert([leader, other])
