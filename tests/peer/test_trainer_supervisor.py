"""Supervision of trainers that are fakes."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from p2ptrain.base.daemon_thread import DaemonThread
from p2ptrain.base.errors import DeviceError, UserError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.trainer.process import TrainerDiedError
from peer.training import trainer_supervisor
from peer.training.trainer_supervisor import FIRST_TRIES, TrainerSupervisor, oom_kills


class FakeTrainer:
    """Trainer that waits for its end, or begins, or fails as the test says."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome
        self.ended = threading.Event()

    def attach(self) -> dict[str, Any]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome == "hangs":
            assert self.ended.wait(60.0)
            raise TrainerDiedError("was ended")
        return {"first": self.outcome}

    def kill(self) -> None:
        self.ended.set()

    close = kill


class Supervised:
    def __init__(self, *outcomes: object, gives_up: bool = True) -> None:
        self.log, self.adopted, self.size = MemoryLog(), list[Any](), 8
        self.made = [FakeTrainer(outcome) for outcome in outcomes]
        coming = iter(self.made)
        self.supervisor = TrainerSupervisor(
            lambda: next(coming),  # type: ignore[arg-type,return-value]  # a fake
            lambda trainer: trainer.attach(),  # type: ignore[attr-defined]
            lambda trainer, first: self.adopted.append(first["first"]),
            self.shrink,
            self.log,
            gives_up,
        )

    def shrink(self) -> int:
        self.size //= 2
        return self.size

    @property
    def pauses(self) -> list[float]:
        return [fields["seconds"] for kind, fields in self.log.notes if kind == "trainer died"]


@contextmanager
def supervised(*outcomes: object, gives_up: bool = True) -> Iterator[Supervised]:
    found = Supervised(*outcomes, gives_up=gives_up)
    try:
        yield found
    finally:
        found.supervisor.close()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.001, 0.004))


DEATH = TrainerDiedError("its process 7 was ended by signal 9", was_killed=True)


def test_a_trainer_that_cannot_start_is_an_error_after_some_tries():
    with supervised(*[DEATH] * FIRST_TRIES) as each, pytest.raises(DeviceError, match="process 7 was ended"):
        each.supervisor.start()
    assert each.pauses == [0.001, 0.002]  # none after the last


def test_a_process_that_the_system_refuses_is_a_trainer_that_cannot_start(monkeypatch):
    def refused():
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with supervised() as each:
        monkeypatch.setattr(each.supervisor, "_new", refused)
        with pytest.raises(DeviceError, match="process cannot begin: Resource temporarily unavailable"):
            each.supervisor.start()


def test_the_wait_for_the_first_trainer_can_be_interrupted():
    async def node(each: Supervised) -> None:
        with DaemonThread("training") as thread:
            starting = asyncio.create_task(thread.run(each.supervisor.start))
            while each.supervisor._starting is not each.made[0]:
                await asyncio.sleep(0.001)
            starting.cancel()
            await asyncio.wait([starting])
            async with asyncio.timeout(60.0):
                await thread.run(int)

    with supervised("hangs") as each:
        asyncio.run(node(each))
        assert not each.made[0].ended.is_set()


def test_where_another_computer_may_return_it_is_tried_on():
    with supervised(*[DEATH] * (FIRST_TRIES + 2), "here", gives_up=False) as each:
        each.supervisor.start()
        assert each.adopted == ["here"]


def test_pauses_grow_until_a_trainer_lasts(monkeypatch):
    with supervised("one", DEATH, DEATH, DEATH, "two", "three") as each:
        each.supervisor.start()
        each.supervisor.replace(DEATH)
        assert not each.supervisor.is_ready
        wait_until(lambda: each.supervisor.is_ready)
        assert each.pauses == [0.001, 0.002, 0.004, 0.004]
        monkeypatch.setattr(trainer_supervisor, "LASTING_S", 0.0)
        each.supervisor.replace(DEATH)
        wait_until(lambda: each.supervisor.is_ready)
        assert each.pauses[4:] == [0.001]
        assert each.adopted == ["one", "two", "three"]
        assert each.log.kinds().count("trainer returned") == 2


def test_short_memory_makes_the_next_one_smaller_as_a_card_or_the_system_reports_it(monkeypatch):
    kills = [0]
    monkeypatch.setattr(trainer_supervisor, "oom_kills", lambda: kills[0])
    with supervised(*"abcde") as each:
        each.supervisor.start()
        for died in (DEATH, TrainerDiedError("out of memory", "memory"), DEATH, TrainerDiedError("ended with 1")):
            kills[0] += died is DEATH and each.size == 4  # the second time it was the system
            each.supervisor.replace(died)
            wait_until(lambda: each.supervisor.is_ready)
        sizes = [fields["micro_batch"] for kind, fields in each.log.notes if kind == "trainer died"]
        assert sizes == [None, 4, 2, None]


def test_a_fault_of_the_owner_is_raised_where_trainers_are_asked():
    with supervised("one", UserError("This machine has no cuda:0.", "Try another.")) as each:
        each.supervisor.start()
        returned = threading.Event()
        each.supervisor.on_return = returned.set
        each.supervisor.replace(DEATH)
        assert returned.wait(60.0)
        with pytest.raises(UserError, match="no cuda:0"):
            _ = each.supervisor.is_ready


def test_closing_ends_a_trainer_that_is_starting():
    with supervised("one", "hangs") as each:
        each.supervisor.start()
        each.supervisor.replace(DEATH)
        wait_until(lambda: each.supervisor._starting is each.made[1])
    assert each.made[1].ended.is_set()


def test_the_systems_count_of_processes_ended_for_memory(tmp_path):
    file = tmp_path / "vmstat"
    file.write_text("nr_free_pages 7\noom_kill 3\n")
    assert oom_kills(file) == 3
    assert oom_kills(tmp_path / "none") == 0
