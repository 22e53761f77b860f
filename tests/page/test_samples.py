"""Texts that are kept over a run: the first, the newest and some between them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from p2ptrain.page.contributors import Contribution
from p2ptrain.page.memory import PAGE_FILE, PageMemory
from p2ptrain.page.samples import MOST_SAMPLES, SampleHistory, SampleText


def text(number: int, peer: str = "a") -> SampleText:
    return SampleText(float(number), peer, number, "", f"text {number}", 100.0 * number)


def test_the_first_and_the_newest_stay_and_the_others_are_evenly_spread() -> None:
    history = SampleHistory()
    for number in range(500):
        history.add(text(number))
    steps = [each.step for each in history.texts]
    assert len(steps) == MOST_SAMPLES
    assert (steps[0], steps[-1]) == (0, 499)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps[:-1]) <= 4 * min(gaps[:-1]), gaps


def test_an_unchanged_text_is_kept_once() -> None:
    history = SampleHistory()
    for _ in range(3):
        history.add(text(1))
    assert history.texts == [text(1)]


def test_texts_of_a_peer_can_be_withdrawn() -> None:
    history = SampleHistory()
    for number in range(4):
        history.add(text(number, "ab"[number % 2]))
    history.forget("a")
    assert [each.step for each in history.texts] == [1, 3]


def test_a_home_remembers_its_run_and_no_other(tmp_path: Path) -> None:
    memory = PageMemory("run", tmp_path)
    memory.samples.add(text(1))
    memory.contributions.take(Contribution("a", tokens=5))
    memory.save()
    again = PageMemory.load(tmp_path, "run")
    assert again.samples.texts == [text(1)]
    assert again.contributions.rows["a"].tokens == 5
    assert PageMemory.load(tmp_path, "other") == PageMemory("other", tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"run": "run"}', b'{"run": "run", "samples": 3}'])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PAGE_FILE).write_bytes(content)
    assert PageMemory.load(tmp_path, "run") == PageMemory("run", tmp_path)


def test_an_unchanged_memory_is_not_written_again(tmp_path: Path) -> None:
    memory = PageMemory("run", tmp_path)
    memory.save()
    (tmp_path / PAGE_FILE).unlink()
    memory.save()
    assert not (tmp_path / PAGE_FILE).exists()
    memory.samples.add(text(1))
    memory.save()
    assert (tmp_path / PAGE_FILE).exists()
