"""docker/check.py without an engine: a fake docker simulates a swarm."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
ENGINE = """#!{python}
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
place = Path(os.environ["ENGINE"])
state = json.loads(place.read_text())
with Path(os.environ["ASKED"]).open("a") as log:
    log.write(json.dumps(words) + "\\n")
if words[0] == "compose":
    if "up" in words:
        state["up"] = True
        state["port"] = os.environ["PAGE_PORT"]
    if "down" in words:
        state["up"] = False
def entry(name):
    service = name.rstrip("0123456789")
    own = state["containers"][name]
    ended = own.get("exit", 0)
    health = {} if service == "router" else {"Health": {"Status": own.get("health", "healthy")}}
    return {"Id": name, "Name": "/" + name, "Config": {"Labels": {"com.docker.compose.service": service}},
            "State": {"Running": own["status"] == "running", "Status": own["status"], "ExitCode": ended, **health}}
out = ""
if words[0] == "ps" and state["up"]:
    out = "\\n".join(state["containers"])
elif words[0] == "inspect":
    out = json.dumps([entry(name) for name in words[1:]])
elif words[0] in ("kill", "stop"):
    status = 137 if words[0] == "kill" else state.get("stop_status", 0)
    state["containers"][words[-1]] |= {"status": "exited", "exit": status}
elif words[0] == "start":
    state["containers"][words[1]] |= {"status": "running"}
    state["link"] = state.get("next_link", state["link"])
elif words[0] == "logs":
    out = state["logs"]
elif words[0] == "exec" and "stat" in words:
    out = state["owner"]
elif words[0] == "exec" and "tc" in words:
    out = state["line"]
elif words[0] == "exec" and "cat" in words:
    out = state["link"]
elif words[0] == "exec":
    state["exchanges"] += state["pace"]
    out = json.dumps({"training": {"exchanges_ok": state["exchanges"]}})
    print("a warning that is not JSON", file=sys.stderr)
place.write_text(json.dumps(state))
print(out)
"""


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_check", ROOT / "docker" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the program, with an engine on which all succeeds and a page that shows all peers."""
    tool = tmp_path / "bin" / "docker"
    tool.parent.mkdir()
    tool.write_text(ENGINE.replace("{python}", sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.setenv("ENGINE", str(tmp_path / "engine"))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    module: Any = loaded()
    names = ["adversary1", "bootstrap1", "hidden1", "peer1", "peer2", "router1", "slow1"]
    state = {"up": False, "owner": "10001", "link": "p2ptrain://a", "exchanges": 0, "pace": 2}
    state |= {"line": "qdisc tbf 8001: root refcnt 5 rate 2Mbit burst 64Kb lat 300ms"}
    state |= {"containers": {name: {"status": "running"} for name in names}}
    state |= {"logs": "[save] saved /data/peer/step-1\n[stop] ending this inner step\n[save] saved /data/peer/step-2\n"}
    (tmp_path / "engine").write_text(json.dumps(state))
    for name in ("POLL_S", "HEALTHY_S", "EXCHANGES_S"):
        monkeypatch.setattr(module, name, 0.0 if name == "POLL_S" else 1.0)
    monkeypatch.setattr(module, "page", shown)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return module


def shown(port: int, token: str, host: str = "127.0.0.1", path: str = "/status") -> tuple[int, str]:
    if host != "127.0.0.1":
        return 403, ""
    if token in ("", "another"):
        return 401, ""
    tells = {"state": "training", "exchanges": 2, "loss": 3.0, "path": "direct"}
    silent = {"state": "training", "exchanges": None, "loss": None, "path": "direct"}
    peers = [tells, tells, tells, tells | {"path": "relayed"}, silent, silent | {"state": "gone"}]
    return 200, json.dumps({"peers": peers})


@pytest.fixture
def engine(check: Any, tmp_path: Path) -> Callable[..., None]:
    """Change the fake engine's behaviour."""

    def change(**fields: Any) -> None:
        state = json.loads((tmp_path / "engine").read_text())
        (tmp_path / "engine").write_text(json.dumps(state | fields))

    return change


@pytest.fixture
def asked(tmp_path: Path) -> Callable[[], list[list[str]]]:
    return lambda: [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def test_a_swarm_that_goes_on_passes_and_nothing_stays(
    check: Any, asked: Callable[[], list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main() == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("docker: the compose file passed in ")
    calls = asked()
    acts = [call[0:1] + call[-1:] for call in calls if call[0] in ("kill", "start", "stop")]
    assert acts == [["kill", "peer1"], ["kill", "bootstrap1"], ["start", "bootstrap1"], ["stop", "peer2"]]
    compose = [call for call in calls if call[:2] == ["compose", "-p"]]
    assert [next(word for word in call if word in ("up", "down")) for call in compose] == ["down", "up", "down"]
    assert compose[1][2] == "p2ptrain-check"  # not the project of the owner's own swarm
    assert compose[1][-5:] == ["up", "--build", "--detach", "--scale", "peer=2"]
    assert all("--volumes" in call for call in (compose[0], compose[2]))
    for call in compose:  # else down would leave the services of a profile
        assert [call[at + 1] for at, word in enumerate(call) if word == "--profile"] == ["slow", "nat", "adversary"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pace": 0}, "expected 3 more exchanges of each peer: peer2 made 0, slow1 made 0, hidden1 made 0"),
        ({"line": "qdisc noqueue 0: root refcnt 2"}, "the link of slow1 is not slow: qdisc noqueue"),
        ({"owner": "0"}, "owner of the home of hidden1: expected user 10001, got 0"),
        ({"next_link": "p2ptrain://b"}, "the bootstrap came back with another join link"),
        ({"stop_status": 137}, "the stopped peer did not exit cleanly: peer peer2 (exited, status 137, healthy)"),
        ({"logs": "[save] saved /data/peer/step-1\n[stop] ending\n[save] NOT saved"}, "does not report a save"),
    ],
)
def test_what_goes_wrong_is_said_with_the_last_words_and_all_is_taken_down(
    check: Any,
    engine: Callable[..., None],
    asked: Callable[[], list[list[str]]],
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    why: str,
) -> None:
    engine(**fields)
    assert check.main() == 1
    said = capsys.readouterr().out
    assert "docker: the compose file FAILED: " in said
    assert why in said
    assert "--- hidden hidden1 (running, status 0, healthy)" in said
    assert "down" in asked()[-2]
    assert asked()[-1][0] == "ps"


def test_whoever_interrupts_it_finds_nothing_left(
    check: Any, monkeypatch: pytest.MonkeyPatch, asked: Callable[[], list[list[str]]]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "homes_are_the_users", interrupted)
    assert check.main() == 130
    assert "down" in asked()[-2]


def test_what_the_build_of_the_testnet_is_told_compose_is_told_too(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that Compose gets the options of the testnet's build, and none that compose.yaml does not know."""
    monkeypatch.setenv(check.BUILD_VARIABLE, "--network host --no-cache --build-arg TORCH_INDEX=none")
    monkeypatch.setenv("BACKBONE", "10.99.1")
    told = check.environment_for(8080, "secret")
    assert (told["BUILD_NETWORK"], told["TORCH_INDEX"]) == ("host", "none")
    assert (told["BACKBONE"], told["HOME_NETWORK"], told["PAGE_PORT"]) == ("10.99.1", "10.231.79", "8080")
    text = (ROOT / "docker" / "compose.yaml").read_text()
    for name in set(told) - set(os.environ) | {"BACKBONE"}:
        assert f"${{{name}:-" in text, name
