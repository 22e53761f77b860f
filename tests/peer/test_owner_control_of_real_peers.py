"""Owner control of real processes: a bootstrap and two peers on loopback.

One peer is capped, paused, resumed, exceeds its monthly budget, and finishes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm import Program, Swarm, endless_swarm, nowhere, until

from p2ptrain import checkpoint
from peer.owner.control_socket import ask

pytestmark = pytest.mark.net

ROOT = Path(__file__).parent.parent.parent


def command(name: str, program: Program, *options: str) -> tuple[int, str]:
    """Run a command, and return its exit status and output."""
    words = [sys.executable, "-m", "p2ptrain.cli", name, str(program.home), *options]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def status(program: Program) -> dict[str, Any]:
    """Return the status as this process reads it, which needs less time than a command."""
    return dict(ask(program.home, command="status")["status"])


def shown(program: Program) -> dict[str, Any]:
    """Return the document of the peer's page."""
    with urllib.request.urlopen(f"{program.wait_for('page')['url']}status", timeout=10) as answer:
        return dict(json.load(answer))


def edit(program: Program, **options: object) -> None:
    """Change lines of the settings, as the owner does."""
    path = program.home / "settings.toml"
    text = path.read_text()
    for name, value in options.items():
        text, times = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert times == 1
    path.write_text(text)


def wait_for_checkpoint(program: Program, tokens: int) -> None:
    """Wait until the newest checkpoint has so many tokens; a message could be about an earlier one."""

    def there() -> bool:
        newest = checkpoint.load_latest(program.home / "checkpoints").checkpoint
        return newest is not None and newest.state["tokens"] == tokens

    until("what is held to be saved", there)


@pytest.fixture(scope="module")
def company() -> Iterator[tuple[Swarm, Program, Program]]:
    with endless_swarm("anna", "bert") as (swarm, _, peers):
        yield swarm, *peers


def test_caps_pause_resume_budget_and_finish(company: tuple[Swarm, Program, Program]) -> None:
    _, anna, bert = company

    code, printed = command("status", anna, "--json")
    assert (code, json.loads(printed)["state"]) == (0, "training")
    edit(anna, upload_mbit=1, download_mbit=2)
    anna.wait_for("settings")
    anna.wait_for_more("exchanged", peer=bert.peer_id)
    assert status(anna)["settings"]["upload_mbit"] == 1

    edit(anna, upload_mbit='"much"')
    assert "upload_mbit: input should be" in anna.wait_for("settings refused")["why"]
    assert status(anna)["settings"]["upload_mbit"] == 1
    edit(anna, upload_mbit=1)

    assert command("pause", anna) == (0, "pausing\n")
    held = anna.wait_for("held")
    wait_for_checkpoint(anna, held["tokens"])
    until("anna to be away", lambda: status(anna)["peers"] == 0)
    code, printed = command("pause", anna, "--for", "2h")
    assert (code, printed.startswith("now paused until ")) == (0, True)
    paused = status(anna)
    assert (paused["state"], paused["why"].startswith("requested by its owner until ")) == ("paused", True)
    steps = bert.wait_for("progress")["step"]
    until("bert to go on alone", lambda: bert.wait_for("progress")["step"] > steps + 20)
    assert status(anna)["training"]["tokens"] == held["tokens"]

    assert command("resume", anna) == (0, "resuming\n")
    assert anna.wait_for("goes on")["step"] >= held["step"]
    anna.wait_for_more("exchanged", peer=bert.peer_id)
    bert.wait_for_more("exchanged", peer=anna.peer_id)
    assert status(anna)["state"] == "training"

    game = anna.home / "p2ptest-game"
    game.write_text("#!/bin/sh\nread line\n")
    game.chmod(0o755)
    with subprocess.Popen([game], stdin=subprocess.PIPE):
        edit(anna, pause_while='["p2ptest-game"]')
        assert anna.wait_for("paused", 1)["why"] == "p2ptest-game is running (pause_while in settings.toml)"
        until("anna to rest", lambda: status(anna)["state"] == "paused")
    edit(anna, pause_while="[]")
    anna.wait_for("called back", 1)
    anna.wait_for_more("exchanged", peer=bert.peer_id)

    edit(anna, monthly_gb=1e-6)
    until("anna to be away", lambda: status(anna)["state"] == "paused" and status(anna)["peers"] == 0)
    month = status(anna)["month"]
    assert month["sent_bytes"] + month["received_bytes"] >= month["allowed_bytes"]
    edit(anna, monthly_gb=0)
    anna.wait_for("called back", 2)
    anna.wait_for_more("exchanged", peer=bert.peer_id)

    code, printed = command("finish", anna)
    assert (code, printed.splitlines()[0]) == (0, "finishing")
    assert f"p2ptrain export {anna.home} model-of-anna\n" in printed
    assert anna.end() == 0, anna.output
    assert "Traceback" not in anna.output
    summary = json.loads((anna.home / "summary.json").read_text())
    assert summary["exchanges_ok"] == len(anna.events("exchanged"))  # of all three sessions in the swarm
    saved = checkpoint.load_latest(anna.home / "checkpoints").checkpoint
    assert saved is not None
    assert saved.state["inner_step"] == 0
    assert json.loads((anna.home / "traffic.json").read_text())
    assert not [path for path in anna.home.iterdir() if path.name.startswith("control")]
    code, printed = command("status", anna)
    assert code == 2
    assert "not running" in printed
    assert f"outer step {saved.state['step']}" in printed
    assert f"No peer runs in {anna.home}." in printed
    assert command("pause", anna)[0] == 2


@pytest.mark.lab
def test_sigkill_and_ctrl_c_while_it_rests(company: tuple[Swarm, Program, Program]) -> None:
    swarm, _, bert = company
    cleo = swarm.peer("cleo", "--page", "0")
    cleo.wait_for("exchanged")
    until("its page to tell of an exchange", lambda: shown(cleo)["exchanges"])
    tokens = shown(cleo)["figures"]["tokens"]
    until("its page's figures to move", lambda: shown(cleo)["figures"]["tokens"] > tokens)
    assert command("pause", cleo)[0] == 0
    held = cleo.wait_for("held")
    wait_for_checkpoint(cleo, held["tokens"])
    until("its traffic to be on disk", (cleo.home / "traffic.json").exists)
    cleo.kill()
    assert (cleo.home / "control.sock").exists()
    assert command("resume", cleo)[0] == 2

    cleo = swarm.peer("cleo", link=None)
    cleo.wait_for("still paused")
    assert cleo.wait_for("resumed")["step"] == held["step"]
    until("cleo to be paused", lambda: status(cleo)["training"] is not None)
    assert status(cleo)["state"] == "paused"
    assert command("resume", cleo) == (0, "resuming\n")
    cleo.wait_for("exchanged")
    assert status(cleo)["month"]["sent_bytes"] > status(cleo)["training"]["exchanges_ok"] > 0
    ask(cleo.home, command="pause")
    cleo.wait_for("held")
    cleo.interrupt()
    assert cleo.end() == 0, cleo.output
    assert not (cleo.home / "control.sock").exists()
    until("nothing of it to be left", lambda: not cleo.processes())
    bert.wait_for_more("progress")


def test_commands_before_there_is_a_swarm() -> None:
    """Check a link whose bootstrap is gone: the peer waits for the manifest, says so, and ends on command."""
    with nowhere() as swarm:
        dora = swarm.peer("dora")
        dora.wait_for("waiting")
        found = status(dora)
        assert found["state"] == "starting"
        assert any("no address in the link" in each["line"] for each in found["lines"])
        assert command("pause", dora) == (0, "pausing\n")
        assert status(dora)["state"] == "paused"
        assert command("finish", dora) == (0, "stopping before training began\n")
        assert dora.end() == 0, dora.output
        assert "Traceback" not in dora.output
