"""Trainers in processes of their own: the host vector, the line, and how a node notices their end."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.trainer import process
from p2ptrain.trainer.host_vector import HostVector
from p2ptrain.trainer.process import TrainerDiedError, TrainerHandle

pytestmark = pytest.mark.net

HERE = Path(__file__).parent
PLAIN = (sys.executable, str(HERE / "plain_trainer.py"))


def mortal(folder: Path, how: str, step: int) -> tuple[str, ...]:
    """Return the command of the plain trainer that ends in this step of its first life."""
    return sys.executable, str(HERE / "mortal_trainer.py"), how, str(step), str(folder), "1"


class Node:
    """What a node keeps while its trainers come and go."""

    host: HostVector | None = None
    counters = (0, 0, 0, 0)

    def memory(self, layout: FlatLayout, vectors: int) -> tuple[HostVector, bool]:
        is_new = self.host is None
        self.host = self.host or HostVector.create(layout.total, vectors)
        return self.host, is_new

    @contextmanager
    def trainer(self, *command: str) -> Iterator[TrainerHandle]:
        started = TrainerHandle(command or PLAIN, MemoryLog())
        try:
            assert started.attach({}, self.memory)["shares"]
            started.ask("restore", counters=self.counters, loss_scale=[])
            yield started
        finally:
            started.close()

    def step(self, trainer: TrainerHandle) -> float:
        answer = trainer.ask("step", progress=0.0, remaining_s=None)
        self.counters = answer["counters"]
        return float(answer["loss"])


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def open_files() -> set[str]:
    """Return what this process's descriptors refer to."""
    return {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}


def test_a_plain_torch_program_trains_in_the_nodes_memory():
    node = Node()
    with node.trainer() as trainer:
        assert node.host is not None
        before = node.host.vector(0).clone()
        losses = [node.step(trainer) for _ in range(60)]
        assert losses[-1] < 0.1 * losses[0]
        assert not torch.equal(node.host.vector(0), before)
        assert not node.host.is_torn(1)
        node.host.vector(0)[:4] = 1.0
        node.host.vector(0)[16] = 0.0  # the bias
        assert node.step(trainer) == pytest.approx(0.0, abs=1e-10)
        pid = trainer.pid
    assert has_ended(pid)


def test_a_node_that_goes_on_without_its_trainer_has_nothing_of_it_left():
    Node().trainer  # noqa: B018 - what importing opens is open now
    before = open_files()
    node = Node()
    with node.trainer():
        assert node.host is not None
    node.host.close()
    assert open_files() <= before


def test_a_trainer_that_dies_leaves_weights_and_moments_to_the_next_one(tmp_path):
    lasting, node = Node(), Node()
    with lasting.trainer() as trainer:
        for _ in range(5):
            lasting.step(trainer)
    with node.trainer(*mortal(tmp_path, "kill before", 3)) as trainer:
        for _ in range(2):
            node.step(trainer)
        with pytest.raises(TrainerDiedError, match="was ended by signal 9") as died:
            node.step(trainer)
        assert (died.value.kind, died.value.was_killed) == ("", True)
        assert node.host is not None
        assert not node.host.is_torn(1)
    with node.trainer() as trainer:
        for _ in range(3):
            node.step(trainer)
    assert lasting.host is not None
    assert node.counters == lasting.counters == [5, 5, 0, 0]
    for number in range(3):
        assert torch.equal(node.host.vector(number), lasting.host.vector(number))


def test_a_trainer_that_dies_while_its_optimizer_moves_the_weights_leaves_them_torn(tmp_path):
    node = Node()
    with node.trainer(*mortal(tmp_path, "kill within", 2)) as trainer:
        node.step(trainer)
        with pytest.raises(TrainerDiedError):
            node.step(trainer)
        assert node.host is not None
        assert node.host.is_torn(1)


def test_a_trainer_that_reports_a_fault_is_ended(tmp_path):
    with Node().trainer(*mortal(tmp_path, "fail", 1)) as trainer:
        with pytest.raises(TrainerDiedError, match=r"^CUDA error: an illegal memory access$") as died:
            trainer.ask("step", progress=0.0, remaining_s=None)
        assert (died.value.kind, died.value.was_killed) == ("device", False)
    assert has_ended(trainer.pid)


def test_a_frozen_trainer_is_ended(monkeypatch, tmp_path):
    node = Node()
    with node.trainer(*mortal(tmp_path, "freeze", 1)) as trainer:
        monkeypatch.setattr(process, "LISTENING_S", 0.1)  # not before it has imported torch
        with pytest.raises(TrainerDiedError, match="no sign of life"):
            node.step(trainer)
    assert has_ended(trainer.pid)


def test_a_trainer_without_its_node_ends_within_seconds():
    with Node().trainer() as trainer:
        trainer._close_lines()
        until = time.monotonic() + 20
        while trainer._process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert trainer._process.returncode == 0


SPEAKER = """
import json, os, socket
node = socket.socket(socket.AF_UNIX)
address = os.environ["P2PTRAIN_NODE"]
node.connect("\\0" + address[1:] if address.startswith("@") else address)
def say(**message): node.sendall(json.dumps(message).encode() + b"\\n")
say(rank=0, pid=os.getpid())
{}
node.recv(1 << 20)
node.recv(1)
"""
"""A trainer that says something and waits for the node's end."""


@pytest.mark.parametrize(
    ("says", "how"),
    [
        ("raise SystemExit(3)", "ended with exit status 3"),
        ("node.close(); import time; time.sleep(60)", "closed its line"),
        ("node.sendall(b'loss: 3\\n')", "sent a line that is not a JSON object"),
        ("node.sendall(b'3\\n')", "sent a line that is not a JSON object"),
        ("node.sendall(b'[' * 100_000 + b'\\n')", "sent a line that is not a JSON object"),
        ("node.sendall(b'[' * (1 << 23))", "sent a line of more than 4,194,304 bytes"),
        ("say(attach={'names': ['a'], 'shapes': [], 'vectors': 4})", "does not fit: ValueError"),
        ("say(attach={'names': ['a'], 'shapes': [[-4]], 'vectors': 4})", "does not fit: ValueError"),
        ("say(attach={'names': ['a'], 'shapes': [[4]], 'vectors': 'many'})", "does not fit: ValueError"),
        ("say(attach={'names': ['a'], 'shapes': [[1 << 61]], 'vectors': 4})", "does not fit: O"),
        ("say(attach={'names': ['a']})", "does not fit: KeyError"),
        ("say(attach=3)", "does not fit: TypeError"),
        ("say(log='loud')", "does not fit: KeyError"),
        ("say(failed=['all'])", r"\['all'\]|^$"),
    ],
)
def test_a_program_that_talks_nonsense_is_ended_and_the_error_says_why(says, how, monkeypatch):
    monkeypatch.setattr(process, "ENDING_S", 0.2)
    started = TrainerHandle((sys.executable, "-S", "-c", SPEAKER.format(says)), MemoryLog())
    with pytest.raises(TrainerDiedError, match=how):
        started.attach({}, Node().memory)
    assert has_ended(started.pid)


TWO_RANKS = """
import json, os, socket
address = os.environ["P2PTRAIN_NODE"]
def begun(rank):
    node = socket.socket(socket.AF_UNIX)
    node.connect("\\0" + address[1:] if address.startswith("@") else address)
    node.sendall(json.dumps({"rank": rank, "pid": os.getpid()}).encode() + b"\\n")
    return node
first, second = begun(0), begun(1)
first.recv(1 << 20)
first.sendall(b'{"alive": true}\\n' * 40 + b'{"attach": {"names": ["a"], "shapes": [[4]], "vectors": 4}}\\n')
first.recv(1 << 20)
first.sendall(b'{"answer": {"shares": true}}\\n')
first.recv(1)
"""
"""Two ranks of one process, whose first one says at once that it has long been alive."""


def test_signs_of_life_that_have_waited_for_the_node_make_no_other_rank_silent():
    started = TrainerHandle((sys.executable, "-S", "-c", TWO_RANKS), MemoryLog(), ranks=2)
    try:
        assert started.attach({}, Node().memory) == {"shares": True}
    finally:
        started.close()


def test_a_trainer_without_memory_for_its_weights_is_ended_and_the_error_says_so():
    def memory(layout, vectors):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    started = TrainerHandle(PLAIN, MemoryLog())
    with pytest.raises(TrainerDiedError, match=r"^there is no memory for its weights: Cannot allocate memory$"):
        started.attach({}, memory)
    assert has_ended(started.pid)


def test_a_program_that_never_speaks_is_ended(monkeypatch):
    monkeypatch.setattr(process, "LISTENING_S", 0.01)
    started = TrainerHandle((sys.executable, "-S", "-c", "import time; time.sleep(60)"), MemoryLog())
    with pytest.raises(TrainerDiedError, match="did not begin within 3 s"):
        started.attach({}, Node().memory)
    assert has_ended(started.pid)


def test_the_vectors_vanish_with_their_processes():
    host = HostVector.create(100, 2)
    other = HostVector.attach(os.dup(host.fd), 100)
    other.vector(1).fill_(2.0)
    assert host.vector(1).sum() == 200.0
    assert host.vector(0).sum() == 0.0
    assert host.vector(1).data_ptr() % 16 == 0
    host.close()
    other.close()


def test_vectors_are_torn_if_a_rank_ends_within_a_move_or_before_one_that_another_has_made():
    host = HostVector.create(100, 2)
    other = HostVector.attach(os.dup(host.fd), 100)
    assert not other.is_torn(2)
    with host.moving(0):
        assert other.is_torn(2)
    assert other.is_torn(2)
    with host.moving(1):
        assert other.is_torn(2)
    assert not other.is_torn(2)
    with pytest.raises(MemoryError), host.moving(0):
        raise MemoryError
    assert other.is_torn(1)
    host.close()
    other.close()
