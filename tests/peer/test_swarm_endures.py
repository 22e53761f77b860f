"""Failures of members of a real swarm, which the others survive: late joins, departures, deaths at the worst
moment.

Two peers run during the whole file; every test adds a third one that fails.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from swarm import Program, Swarm, endless_swarm, until

from p2ptrain import checkpoint
from p2ptrain.swarm.rules import ANNOUNCE_PERIOD_S

pytestmark = pytest.mark.net


@dataclass(frozen=True)
class Company:
    swarm: Swarm
    bootstrap: Program
    anna: Program
    bert: Program
    emil: Program
    """Started together with the others, which takes less time, and ended by the test that needs it."""
    began: float
    """Time at which all had exchanged, on the monotonic clock."""

    def goes_on(self) -> None:
        """Check that both survivors exchange with each other from now on."""
        self.anna.wait_for_more("exchanged", 3, peer=self.bert.peer_id)
        self.bert.wait_for_more("exchanged", 3, peer=self.anna.peer_id)


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    with endless_swarm("anna", "bert", "emil") as (swarm, bootstrap, peers):
        yield Company(swarm, bootstrap, *peers, began=time.monotonic())
        assert [each.terminate() for each in (*peers[:2], bootstrap)] == [0, 0, 0]


def test_a_late_joiner_takes_the_weights_and_leaves_politely(company: Company) -> None:
    step = company.anna.wait_for("progress")["step"]
    # A newcomer compares copies of those only whose records are ahead of it, also after the first seconds.
    until("all records to be renewed", lambda: time.monotonic() > company.began + 1.25 * ANNOUNCE_PERIOD_S)
    cleo = company.swarm.peer("cleo")
    assert cleo.wait_for("caught up")["peer"] in {each.peer_id for each in (company.anna, company.bert, company.emil)}
    assert not cleo.events("unconfirmed")  # the other donor's copy was compared, and was near
    cleo.wait_for("exchanged", 2)
    assert cleo.wait_for_more("progress")["step"] > step
    company.bootstrap.wait_to_say("cleo (")

    cleo.interrupt()
    assert cleo.end() == 0, cleo.output
    assert cleo.events("stopping")
    assert "Traceback" not in cleo.output
    assert checkpoint.load_latest(cleo.home / "checkpoints").checkpoint is not None
    assert (cleo.home / "summary.json").exists()
    until("the bootstrap to notice", lambda: [x for x in company.bootstrap.output.splitlines() if is_farewell(x)])
    assert cleo.processes() == []
    company.goes_on()


def is_farewell(line: str) -> bool:
    return "cleo (" in line and line.endswith(" left")


def test_sigkill_in_the_middle_of_an_exchange(company: Company) -> None:
    victim = company.swarm.peer("dora", script=Path(__file__).with_name("victim.py"))
    assert victim.end() == -signal.SIGKILL
    assert len(victim.events("exchanged")) >= 1
    dead = victim.peer_id

    def noticed() -> bool:
        return any(each.events("failed", peer=dead) for each in (company.anna, company.bert, company.emil))

    until("a survivor to notice", noticed)
    until("the victim's p2pd to be gone", lambda: not victim.processes())
    company.goes_on()


def test_a_second_ctrl_c_ends_at_once_even_when_the_network_hangs(company: Company) -> None:
    emil = company.emil
    emil.wait_for("exchanged")
    p2pd = emil.daemons()[0]
    p2pd.suspend()  # leaving never ends
    emil.interrupt()
    emil.wait_for("stopping")
    emil.interrupt()
    assert emil.end() == 130, emil.output
    assert "Traceback" not in emil.output
    until("a frozen p2pd to be gone", lambda: not emil.processes())
    company.goes_on()


def test_p2pd_dies_and_comes_back(company: Company) -> None:
    old = company.bert.daemons()[0]
    old.kill()
    company.bert.wait_for("p2pd died")
    company.bert.wait_for("p2pd is back")
    assert company.bert.daemons()[0].pid != old.pid
    company.goes_on()
    assert "Traceback" not in company.bert.output
