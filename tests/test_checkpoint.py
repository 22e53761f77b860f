"""Checkpoints: complete or absent, the last two, recognized when truncated."""

import errno
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError
from p2ptrain.checkpoint import Checkpoints


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(1000, generator=generator)
    return {"theta": flat, "piece": flat[10:20], "across": flat.view(10, 100).T, "count": torch.tensor(seed)}


def state(step):
    return {"step": step, "run": "ab" * 32, "peer": "12D3KooWAlice", "progress": 0.1 + 0.2, "nested": {"tokens": 7}}


def save(directory, step):
    """Save as a session that has loaded the existing checkpoints."""
    checkpoints = Checkpoints(directory)
    checkpoints.load_latest()
    return checkpoints.save(tensors(step), state(step))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_what_was_saved_is_loaded_exactly(tmp_path):
    path = save(tmp_path / "new" / "folder", 120)
    assert path.name == "step-00000120"
    found = checkpoint.load_latest(tmp_path / "new" / "folder")
    assert found.passed_over == ()
    assert found.checkpoint is not None
    assert found.checkpoint.path == path
    assert found.checkpoint.step == 120
    assert found.checkpoint.tensors.keys() == tensors().keys()
    for name, tensor in tensors(120).items():
        assert torch.equal(found.checkpoint.tensors[name], tensor)
    for name, value in state(120).items():
        assert found.checkpoint.state[name] == value


def test_parts_of_a_vector_are_saved_as_one_tensor(tmp_path):
    flat = torch.randn(1000)
    checkpoint.save(tmp_path, {"flat": list(flat.split(300)), "count": torch.tensor(3)}, state(1))
    found = checkpoint.load_latest(tmp_path).checkpoint
    assert torch.equal(found.tensors["flat"], flat)
    assert found.tensors["count"] == 3


def test_the_file_is_what_safetensors_itself_writes(tmp_path):
    whole = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors().items()}
    save_file(whole, tmp_path / "theirs")
    path = checkpoint.save(tmp_path, {**tensors(), "theta": list(tensors()["theta"].split(300))}, state(1))
    assert (path / "tensors.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_its_state_is_readable(tmp_path):
    document = json.loads((save(tmp_path, 1) / "state.json").read_text())
    assert document["peer"] == "12D3KooWAlice"
    assert document["versions"]["torch"]
    assert len(document["files"]["tensors.safetensors"]) == 64


def test_no_checkpoint_is_no_error(tmp_path):
    assert checkpoint.load_latest(tmp_path) == (None, ())
    assert checkpoint.load_latest(tmp_path / "absent") == (None, ())


def test_the_last_two_are_kept(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000030", "step-00000040"]


def test_a_checkpoint_that_is_in_use_on_nfs_is_removed_later(tmp_path, monkeypatch):
    true = shutil.rmtree

    def busy(path, **how):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")  # NFS renames a file in use, and keeps it

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr("shutil.rmtree", busy)
    for step in (1, 2, 3):
        checkpoints.save(tensors(step), state(step))
    assert names(tmp_path) == [".writing-step-00000001", "step-00000002", "step-00000003"]
    monkeypatch.setattr("shutil.rmtree", true)
    checkpoints.save(tensors(4), state(4))
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "readme").write_text("mine")
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert names(tmp_path) == ["readme", "step-00000002", "step-00000003", "step-notes"]


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "tensors cut": lambda path: os.truncate(path / "tensors.safetensors", 100),
    "tensors empty": lambda path: os.truncate(path / "tensors.safetensors", 0),
    "tensors rotten": lambda path: flip_bit(path / "tensors.safetensors"),
    "tensors gone": lambda path: (path / "tensors.safetensors").unlink(),
    "state cut": lambda path: os.truncate(path / "state.json", 50),
    "state rotten": lambda path: flip_bit(path / "state.json"),
    "state gone": lambda path: (path / "state.json").unlink(),
    "state of another kind": lambda path: (path / "state.json").write_text("[]"),
    "state not text": lambda path: (path / "state.json").write_bytes(b"\xff\xfe"),
    "both gone": lambda path: shutil.rmtree(path) or path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_torn_one_is_recognized_and_the_previous_used(tmp_path, damage):
    save(tmp_path, 10)
    torn = save(tmp_path, 20)
    damage(torn)
    found = checkpoint.load_latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 10
    assert [passed.path for passed in found.passed_over] == [torn]
    assert found.passed_over[0].reason


def test_when_all_are_torn_each_is_reported(tmp_path):
    for step in (10, 20):
        os.truncate(checkpoint.save(tmp_path, tensors(), state(step)) / "state.json", 5)
    found = checkpoint.load_latest(tmp_path)
    assert found.checkpoint is None
    assert [passed.path.name for passed in found.passed_over] == ["step-00000020", "step-00000010"]


def test_a_torn_later_one_does_not_crowd_out_the_good(tmp_path):
    save(tmp_path, 10)
    os.truncate(save(tmp_path, 20) / "state.json", 5)
    save(tmp_path, 15)
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_torn_ones_make_room_for_whole_ones(tmp_path):
    save(tmp_path, 10)
    os.truncate(save(tmp_path, 20) / "state.json", 5)
    save(tmp_path, 25)
    assert names(tmp_path) == ["step-00000010", "step-00000025"]


def test_a_later_format_is_not_torn(tmp_path, monkeypatch):
    save(tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr("p2ptrain.checkpoint.store.FORMAT", 4)
        checkpoint.save(tmp_path, tensors(), state(10))
    with pytest.raises(HomeError, match="has format 4, but this p2ptrain reads only format 1") as caught:
        checkpoint.load_latest(tmp_path)
    assert "Resume with the version of p2ptrain that wrote it" in caught.value.remedy
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize(
    "reader", ["pathlib.Path.read_text", "p2ptrain.checkpoint.store.file_digest", "StoredTensors", "iterdir"]
)
def test_what_cannot_be_read_is_not_torn(tmp_path, monkeypatch, reader, number):
    for step in (10, 20):
        save(tmp_path, step)
    target = {"StoredTensors": "p2ptrain.checkpoint.store.StoredTensors", "iterdir": "pathlib.Path.iterdir"}.get(
        reader, reader
    )
    with monkeypatch.context() as patch:
        patch.setattr(target, fail_with(OSError(number, os.strerror(number))))
        with pytest.raises(HomeError, match=f"cannot be read: {os.strerror(number)}; nothing was changed"):
            checkpoint.load_latest(tmp_path)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    assert checkpoint.load_latest(tmp_path).checkpoint.step == 20


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("No such file or directory"), SafetensorError("I/O error: Input/output error (os error 5)")],
)
def test_what_safetensors_cannot_open_is_not_torn(tmp_path, monkeypatch, error):
    """Check a file that cannot be opened: safetensors reports it as missing."""
    save(tmp_path, 10)
    monkeypatch.setattr("p2ptrain.checkpoint.store.StoredTensors", fail_with(error))
    with pytest.raises(HomeError, match="cannot be read"):
        checkpoint.load_latest(tmp_path)


def test_a_disk_that_fails_after_the_check_is_explained(tmp_path, monkeypatch):
    save(tmp_path, 10)
    found = checkpoint.load_latest(tmp_path).checkpoint
    broken = SimpleNamespace(get_tensor=fail_with(SafetensorError("I/O error: Input/output error (os error 5)")))
    monkeypatch.setattr(found.tensors, "_file", broken)
    with pytest.raises(HomeError, match=r"tensors\.safetensors cannot be read: Input/output error"):
        found.tensors["theta"]


def test_only_what_a_session_knows_is_removed(tmp_path):
    """Check a disk that was mounted during the session: nothing on it has been read."""
    session = Checkpoints(tmp_path)
    assert session.load_latest() == (None, ())
    for step in (1, 2, 400, 500):
        checkpoint.save(tmp_path, tensors(step), state(step))
    for step in (3, 4, 5, 6):
        session.save(tensors(step), state(step))
    assert [int(name.removeprefix("step-")) for name in names(tmp_path)] == [1, 2, 5, 6, 400, 500]


def test_a_session_that_went_back_forgets_the_future_that_it_left(tmp_path):
    """Check a pull from a donor with an earlier step: later checkpoints of the old weights are removed."""
    session = Checkpoints(tmp_path)
    for step in (40, 50, 45):
        session.save(tensors(step), state(step))
    assert names(tmp_path) == ["step-00000040", "step-00000045"]
    session = Checkpoints(tmp_path)
    session.load_latest()
    session.save(tensors(42), state(42))
    assert names(tmp_path) == ["step-00000040", "step-00000042"]


def test_a_torn_step_that_was_saved_again_is_whole(tmp_path):
    os.truncate(save(tmp_path, 20) / "state.json", 5)
    session = Checkpoints(tmp_path)
    session.load_latest()
    for step in (20, 30):
        session.save(tensors(step), state(step))
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_a_step_saved_again_is_replaced(tmp_path):
    save(tmp_path, 10)
    checkpoint.save(tmp_path, {"theta": torch.ones(3)}, state(10))
    found = checkpoint.load_latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.tensors.keys() == {"theta"}
    assert names(tmp_path) == ["step-00000010"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_step_that_is_replaced_is_there_at_every_moment(tmp_path, monkeypatch, error):
    """Check every moment of a replacement: between two renames, neither file would have the name."""
    save(tmp_path, 9)
    save(tmp_path, 10)
    rename, done = Path.rename, []

    def breaks(self, target):
        if done:
            raise error
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", breaks)
        with pytest.raises((HomeError, KeyboardInterrupt)):
            checkpoint.save(tmp_path, {"theta": torch.ones(3)}, state(10))
    for _ in range(2):
        before = names(tmp_path)
        found = checkpoint.load_latest(tmp_path)
        assert found.passed_over == ()
        assert found.checkpoint.step == 10
        assert found.checkpoint.tensors.keys() == tensors().keys()
        assert names(tmp_path) == before  # reading must not write: another process may use the home
    with monkeypatch.context() as patch:
        patch.setattr("p2ptrain.checkpoint.store.write_tensors", fail_with(FULL))
        with pytest.raises(HomeError):
            save(tmp_path, 11)
    assert names(tmp_path) == ["step-00000009", "step-00000010"]
    save(tmp_path, 12)
    assert names(tmp_path) == ["step-00000010", "step-00000012"]


def test_a_rename_that_fails_once_is_taken_back(tmp_path, monkeypatch):
    save(tmp_path, 10)
    rename, calls = Path.rename, []

    def breaks(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise FULL
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", breaks)
    with pytest.raises(HomeError):
        save(tmp_path, 10)
    assert names(tmp_path) == ["step-00000010"]


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("p2ptrain.checkpoint.store.write_tensors", FULL),
        ("os.fsync", FULL),
        ("pathlib.Path.write_text", FULL),
        ("pathlib.Path.rename", FULL),
    ],
)
def test_a_full_disk_costs_no_earlier_checkpoint(tmp_path, monkeypatch, target, error):
    for step in (10, 20):
        save(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(target, fail_with(error))
        with pytest.raises(HomeError, match="the disk is full") as caught:
            save(tmp_path, 30)
    assert "unchanged" in caught.value.remedy
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    found = checkpoint.load_latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 20
    save(tmp_path, 30)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_a_real_write_that_fails_midway_leaves_nothing(tmp_path):
    save(tmp_path, 10)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(HomeError, match="cannot be written"):
            save(tmp_path, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert names(tmp_path) == ["step-00000010"]


def test_a_directory_that_cannot_be_made_is_the_homes_fault(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match="Not a directory"):
        save(tmp_path / "file" / "checkpoints", 1)


@pytest.mark.parametrize(
    "moment", ["p2ptrain.checkpoint.store.write_tensors", "p2ptrain.checkpoint.store.Checkpoints._prune"]
)
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path, monkeypatch, moment):
    save(tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(moment, fail_with(KeyboardInterrupt))  # no handler catches it, as with a kill
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 20)
    found = checkpoint.load_latest(tmp_path)
    assert found.checkpoint is not None
    assert found.passed_over == ()
    save(tmp_path, 30)
    assert not [name for name in names(tmp_path) if not name.startswith("step-")]


def test_our_own_names_are_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match=r"may not hold \['digest', 'files'\]"):
        checkpoint.save(tmp_path, {}, {"step": 1, "files": {}, "digest": ""})
