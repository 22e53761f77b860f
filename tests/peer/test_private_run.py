"""A run by invite, as real processes: who is admitted, who is not, and the effect of a ban."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from swarm import ENDLESS, Program, Swarm

from p2ptrain.admission import author
from p2ptrain.manifest import JoinLink
from peer.home import Home
from peer.ledger import proved

pytestmark = [pytest.mark.net, pytest.mark.timeout(600)]


def turned_away(program: Program) -> str:
    """Return the output of a peer that must end by itself with one clear line."""
    assert program.end() == 2, program.output[-3000:]
    return program.output


def said(*words: str) -> str:
    """Return a command's output."""
    command = [sys.executable, "-m", "p2ptrain.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout


@pytest.mark.lab
def test_invited_peers_train_together_and_nobody_else_takes_part() -> None:
    with Swarm(**ENDLESS, admission__policy="invite") as swarm:
        run = swarm.root / "run"
        bootstrap = swarm.bootstrap()
        invited, _ = author.invite(run, JoinLink.parse(swarm.link), 3600, 2, time.time())
        anna = swarm.peer("anna", link=str(invited))
        bert = swarm.peer("bert", link=str(invited))
        for each in (anna, bert):
            each.wait_for("let in")
            each.wait_for("exchanged")

        stranger = swarm.peer("carl")
        assert "this peer shows no invite" in turned_away(stranger)
        assert "Ask the run's author for an invite link" in stranger.output
        assert "its invite is used up" in turned_away(swarm.peer("dora", link=str(invited)))

        assert anna.terminate() == 0
        anna = swarm.peer("anna", link=None)  # its certificate is in its home
        anna.wait_for("exchanged")
        assert anna.events("let in") == []

        author.revoke(run, [bert.peer_id], time.time())
        bootstrap.wait_to_say("1 banned")
        anna.wait_for("rulings", banned=1)
        bert.wait_for("put out")
        anna.wait_for("turned away", peer=bert.peer_id)
        assert "banned" in bert.wait_for("not admitted", peer=anna.peer_id)["why"]
        assert "NOT admitted: the run's author has banned this peer" in said("status", str(bert.home))
        assert "admitted (invite)" in said("status", str(anna.home))
        known = len(anna.events("exchanged"))
        bert.wait_for_more("progress", 3)
        assert len(anna.events("exchanged")) == known
        assert bert.terminate() == 0
        assert anna.terminate() == 0
        done = proved(Home(anna.home))
        assert done.faulty == {}
        assert list(done.partners) == [bert.peer_id]
        assert 0 < done.exchanges <= (anna.home / "events.jsonl").read_text().count('"exchanged"')
        assert "banned this peer" in turned_away(swarm.peer("bert", link=None))


@pytest.mark.lab
def test_a_list_grows_while_the_run_goes_on() -> None:
    with Swarm(**ENDLESS, admission__policy="allowlist") as swarm:
        run = swarm.root / "run"
        bootstrap = swarm.bootstrap()
        anna = swarm.peer("anna")
        assert f"p2ptrain admit RUN {anna.peer_id}" in turned_away(anna)
        author.admit(run, [anna.peer_id], time.time())
        bootstrap.wait_to_say("1 admitted")
        anna = swarm.peer("anna")
        anna.wait_for("started")
        bert = swarm.peer("bert")
        assert "not on the run's list" in turned_away(bert)
        author.admit(run, [bert.peer_id], time.time())
        bootstrap.wait_to_say("2 admitted")
        swarm.peer("bert", link=None).wait_for("exchanged")  # its home has the manifest by now
        anna.wait_for("exchanged")

        for daemon in anna.daemons():
            daemon.kill()
        anna.wait_for("p2pd is back")  # and uses the gate again
        anna.wait_for_more("exchanged", 3)
