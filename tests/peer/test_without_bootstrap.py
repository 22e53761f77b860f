"""SIGKILL of the bootstrap: the swarm continues, its members return, and strangers join by a peer's link."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from swarm import Program, Swarm, endless_swarm

from p2ptrain import checkpoint
from peer.cli import invite

pytestmark = pytest.mark.net


@dataclass
class Orphans:
    swarm: Swarm
    anna: Program
    bert: Program
    """The newest process of that home."""


@pytest.fixture(scope="module")
def orphans() -> Iterator[Orphans]:
    with endless_swarm("anna", "bert") as (swarm, bootstrap, peers):
        assert bootstrap.kill() == -signal.SIGKILL
        yield Orphans(swarm, *peers)


def test_the_swarm_goes_on(orphans: Orphans) -> None:
    orphans.anna.wait_for_more("exchanged", 5)
    orphans.bert.wait_for_more("exchanged", 5)


def test_a_peer_resumes_after_sigterm_and_after_sigkill_and_a_stranger_joins_by_a_peers_link(
    orphans: Orphans, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check two restarts, and a stranger that starts together with the first one, since starting takes long."""
    invite.main([str(orphans.anna.home)], standalone_mode=False)
    link = capsys.readouterr().out.strip()
    bert = orphans.bert
    assert bert.terminate() == 0, bert.output
    saved = checkpoint.load_latest(bert.home / "checkpoints").checkpoint
    assert saved is not None

    bert = orphans.bert = orphans.swarm.peer("bert", link=None)
    cleo = orphans.swarm.peer("cleo", link=link)
    assert bert.wait_for("resumed")["step"] == saved.step
    bert.wait_for("exchanged", 2, peer=orphans.anna.peer_id)
    cleo.wait_for("caught up")
    cleo.wait_for("exchanged", 2)
    assert cleo.terminate() == 0

    assert bert.kill() == -signal.SIGKILL
    saved = checkpoint.load_latest(bert.home / "checkpoints").checkpoint
    assert saved is not None
    bert = orphans.bert = orphans.swarm.peer("bert", link=None)
    assert bert.wait_for("resumed")["step"] == saved.step
    bert.wait_for("exchanged", 2, peer=orphans.anna.peer_id)
