"""Trainers in processes of their own: the host vector, the line, and how a node notices their end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.trainer import process
from p2ptrain.trainer.host_vector import HostVector
from p2ptrain.trainer.process import TrainerDiedError, TrainerHandle

pytestmark = pytest.mark.net

PROGRAM = (sys.executable, str(Path(__file__).parent / "plain_trainer.py"))


class Node:
    """What a node keeps while its trainers come and go."""

    host: HostVector | None = None

    def memory(self, layout: FlatLayout, vectors: int) -> tuple[HostVector, bool]:
        is_new = self.host is None
        self.host = self.host or HostVector.create(layout.total, vectors)
        return self.host, is_new

    @contextmanager
    def trainer(self, **plan: Any) -> Iterator[TrainerHandle]:
        started = TrainerHandle(PROGRAM, MemoryLog())
        try:
            assert started.attach(plan, self.memory) == {"ready": True}
            yield started
        finally:
            started.close()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_plain_torch_program_trains_in_the_nodes_memory():
    node = Node()
    with node.trainer() as trainer:
        assert node.host is not None
        before = node.host.vector(0).clone()
        losses = [trainer.ask("step")["loss"] for _ in range(20)]
        assert losses[-1] < 0.1 * losses[0]
        assert not torch.equal(node.host.vector(0), before)
        pid = trainer.pid
    assert has_ended(pid)


def test_what_the_node_writes_between_two_steps_is_what_the_trainer_computes_with():
    node = Node()
    with node.trainer() as trainer:
        assert node.host is not None
        node.host.vector(0)[:4] = 1.0
        node.host.vector(0)[16] = 0.0  # the bias
        assert trainer.ask("step")["loss"] == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_trainer_that_dies_leaves_its_weights_to_the_next_one(how):
    lasting, mortal = Node(), Node()
    with lasting.trainer() as trainer:
        for _ in range(6):
            trainer.ask("step")
    with mortal.trainer(dies_at=3, how=how) as trainer:
        for _ in range(3):
            trainer.ask("step")
        with pytest.raises(TrainerDiedError) as died:
            trainer.ask("step")
    told = {
        "kill": ("was ended by signal 9", "", True),
        "raise": ("CUDA error: an illegal memory access", "device", False),
    }
    assert told[how][0] in str(died.value)
    assert (died.value.kind, died.value.was_killed) == told[how][1:]
    with mortal.trainer() as trainer:
        trainer.ask("restore", done=3)
        for _ in range(3):
            trainer.ask("step")
    assert lasting.host is not None
    assert mortal.host is not None
    assert torch.equal(lasting.host.vector(0), mortal.host.vector(0))


def test_a_frozen_trainer_is_ended(monkeypatch):
    with Node().trainer(dies_at=0, how="freeze") as trainer:
        monkeypatch.setattr(process, "LISTENING_S", 0.05)  # not before it has imported torch
        with pytest.raises(TrainerDiedError, match="no sign of life"):
            trainer.ask("step")
    assert has_ended(trainer.pid)


def test_a_trainer_without_its_node_ends_within_seconds():
    with Node().trainer() as trainer:
        trainer._close_lines()
        until = time.monotonic() + 20
        while trainer._process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert trainer._process.returncode == 0


def test_a_program_that_cannot_start_says_how_it_ended():
    started = TrainerHandle((sys.executable, "-c", "raise SystemExit(3)"), MemoryLog())
    with pytest.raises(TrainerDiedError, match="ended with exit status 3"):
        started.attach({}, Node().memory)


def test_the_vectors_vanish_with_their_processes():
    host = HostVector.create(100, 2)
    other = HostVector.attach(os.dup(host.fd), 100)
    other.vector(1).fill_(2.0)
    assert host.vector(1).sum() == 200.0
    assert host.vector(0).sum() == 0.0
    assert host.vector(1).data_ptr() % 16 == 0
