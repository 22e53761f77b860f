"""Checkpoints that two ranks write together: any split reads them, and no failure costs an earlier one."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from test_trainer import ThreadGroup

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError, TeamError
from p2ptrain.checkpoint import Share, VectorRange, store
from p2ptrain.team.checkpoints import RankCheckpoints, TeamCheckpoints, _state

TOTAL = 160
CUTS = (96, 32)
"""Where the second rank begins: two splits."""
STATE = {"run": "ab" * 32, "progress": 0.5}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    flat = {name: torch.randn(TOTAL, generator=random) for name in ("slow", "momentum", "theta", "task.first_moment")}
    return {**flat, "task.counters": torch.tensor([seed, 2, 3, 4])}


def part(whole, vector_range):
    return {
        name: list(each[vector_range.begin : vector_range.end].split(40)) if each.shape == (TOTAL,) else each
        for name, each in whole.items()
    }


class Ranks:
    """Two ranks as threads."""

    def __init__(self, directory: Path, cut: int) -> None:
        queues = [SimpleQueue(), SimpleQueue()]
        self.ranges = VectorRange(0, cut, TOTAL), VectorRange(cut, TOTAL, TOTAL)
        self.ranks = [
            RankCheckpoints(directory, ThreadGroup(rank, queues), vector_range)
            for rank, vector_range in enumerate(self.ranges)
        ]

    def load(self):
        """Return what each rank loads, or the error."""

        def attempt(rank):
            try:
                return rank.load_latest()
            except HomeError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(attempt, self.ranks))

    def save(self, step, other=None):
        """Save as the leader; ``other`` is the other rank's part instead of writing."""
        whole = tensors(step)

        def follow():
            with contextlib.suppress(OSError):
                (other or self.ranks[1].write)(part(whole, self.ranges[1]), step)

        def together(own):
            thread = threading.Thread(target=follow)
            thread.start()
            try:
                return own()
            finally:
                thread.join()

        return TeamCheckpoints(self.ranks[0], together).save(part(whole, self.ranges[0]), {"step": step, **STATE})


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def check(found, step, vector_range=None):
    assert found.checkpoint.step == step
    assert found.checkpoint.tensors.keys() == tensors(step).keys()
    for name, whole in tensors(step).items():
        is_cut = vector_range is not None and whole.shape == (TOTAL,)
        wanted = whole[vector_range.begin : vector_range.end] if is_cut else whole
        assert torch.equal(found.checkpoint.tensors[name], wanted), name
    assert found.checkpoint.state["progress"] == 0.5


@pytest.mark.parametrize("cut", CUTS)
def test_one_process_and_any_other_split_load_what_two_ranks_saved(tmp_path, cut):
    path = Ranks(tmp_path, cut).save(7)
    assert names(path) == ["state.json", "tensors-00001-of-00002.safetensors", "tensors-00002-of-00002.safetensors"]
    check(checkpoint.load_latest(tmp_path), 7)
    for other in CUTS:
        ranks = Ranks(tmp_path, other)
        for found, vector_range in zip(ranks.load(), ranks.ranges, strict=True):
            check(found, 7, vector_range)


def test_ranks_load_what_one_process_saved(tmp_path):
    checkpoint.save(tmp_path, tensors(3), {"step": 3, **STATE})
    ranks = Ranks(tmp_path, 96)
    for found, vector_range in zip(ranks.load(), ranks.ranges, strict=True):
        check(found, 3, vector_range)


def test_each_rank_holds_and_writes_its_part_alone(tmp_path):
    path = Ranks(tmp_path, 96).save(7)
    first, second = (checkpoint.StoredTensors([path / name]) for name in names(path)[1:])
    assert second.keys() == tensors(7).keys() - {"task.counters"}
    assert [first.length("slow"), second.length("slow")] == [96, 64]


def test_the_last_two_are_kept_and_an_empty_directory_is_none(tmp_path):
    ranks = Ranks(tmp_path, 96)
    assert ranks.load() == [(None, ()), (None, ())]
    for step in (1, 2, 3):
        ranks.save(step)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert ranks.ranks[0].known.digest == checkpoint_digest(tmp_path)


def checkpoint_digest(directory):
    known = checkpoint.Checkpoints(directory)
    known.load_latest()
    return known.digest


@pytest.mark.parametrize("damage", ["rotten", "cut", "gone", "header"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_part_lets_all_ranks_take_the_previous_one(tmp_path, number, damage):
    ranks = Ranks(tmp_path, 96)
    ranks.save(1)
    path = ranks.save(2) / Share(number, 2).file
    content = bytearray(path.read_bytes())
    match damage:
        case "rotten":
            content[-8] ^= 1
        case "cut":
            del content[len(content) // 2 :]
        case "header":
            content[0] ^= 255
    path.write_bytes(content)
    if damage == "gone":
        path.unlink()
    again = Ranks(tmp_path, 96)
    for found, vector_range in zip(again.load(), again.ranges, strict=True):
        check(found, 1, vector_range)
        assert [each.path.name for each in found.passed_over] == ["step-00000002"]
    again.save(3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_read_nobody_resumes(tmp_path, monkeypatch, rank):
    Ranks(tmp_path, 96).save(1)
    digest, bad = store.file_digest, Share(rank, 2).file

    def broken(path):
        if path.name == bad:
            raise OSError(errno.EIO, "Input/output error")
        return digest(path)

    monkeypatch.setattr(store, "file_digest", broken)
    errors = Ranks(tmp_path, 96).load()
    assert all(isinstance(each, HomeError) for each in errors)
    assert "Input/output error" in str(errors[rank])
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_for_one_rank_costs_no_earlier_checkpoint(tmp_path, monkeypatch, rank):
    ranks = Ranks(tmp_path, 96)
    ranks.save(1)
    write, bad = store.write_tensors, Share(rank, 2).file

    def full(path, tensors):
        if path.name == bad:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_tensors", full)
        with pytest.raises(HomeError, match="the disk is full") as caught:
            ranks.save(2)
    assert "Earlier checkpoints are unchanged" in caught.value.remedy
    assert names(tmp_path) == ["step-00000001"]
    check(checkpoint.load_latest(tmp_path), 1)
    ranks.save(3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


class Killed(BaseException):
    """Nothing handles it, as a kill."""


def kills(*_, **__):
    raise Killed


@pytest.mark.parametrize("moment", ["the leader's file", "the rank's file", "the state", "the rename"])
def test_a_kill_between_files_leaves_the_last_whole_one(tmp_path, monkeypatch, moment):
    ranks = Ranks(tmp_path, 96)
    ranks.save(1)
    with monkeypatch.context() as patch:
        match moment:
            case "the leader's file":
                patch.setattr(RankCheckpoints, "write", kills)
            case "the rank's file":  # the leader has written its own, and hears no more from the rank
                whole = tensors(2)
                store.Checkpoints(tmp_path).prepare(2)
                store.write_part(tmp_path, 2, Share(0, 2), part(whole, ranks.ranges[0]))
            case "the state":
                patch.setattr(store, "_write_state", kills)
            case "the rename":
                patch.setattr(Path, "rename", kills)
        if moment != "the rank's file":
            with pytest.raises(Killed):
                ranks.save(2, other=(lambda tensors, step: None) if moment == "the leader's file" else None)
    assert names(tmp_path) == [".writing-step-00000002", "step-00000001"]
    assert names(tmp_path / ".writing-step-00000002") or moment == "the leader's file"
    check(checkpoint.load_latest(tmp_path), 1)
    again = Ranks(tmp_path, 32)
    for found, vector_range in zip(again.load(), again.ranges, strict=True):
        check(found, 1, vector_range)
    again.save(2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    check(checkpoint.load_latest(tmp_path), 2)


def test_a_later_format_is_not_torn(tmp_path):
    path = Ranks(tmp_path, 96).save(1) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    errors = Ranks(tmp_path, 96).load()
    assert all("has format 9" in str(each) for each in errors)


def test_a_checkpoint_of_a_model_of_another_size_is_returned_whole(tmp_path):
    """Check that ``Learner.load_state_dict`` sees that it does not fit; nothing is torn, so nothing is removed."""
    short = {name: each[:64] if each.shape == (TOTAL,) else each for name, each in tensors(1).items()}
    checkpoint.save(tmp_path, short, {"step": 1, **STATE})
    ranks = Ranks(tmp_path, 96)
    assert [found.checkpoint.tensors["slow"].shape for found in ranks.load()] == [(64,), (64,)]
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("said", [b"", b"[]", b"{", b"[" * 100_000, b'{"step": 4}', b'{"step": "3"}', b"\xff"])
def test_a_state_that_was_changed_on_its_way_is_an_error_of_the_team(said: bytes) -> None:
    with pytest.raises(TeamError, match="the leader's state is invalid"):
        _state("checkpoint 3: state", said, 3)
    assert _state("checkpoint 3: state", b'{"step": 3}', 3) == {"step": 3}
