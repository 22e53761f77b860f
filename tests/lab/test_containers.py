"""Stage of containers, with a fake docker that records its calls."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab import container_summary, containers, inner_main
from lab.command import run_scenario
from lab.containers import Containers, build, check_engine
from lab.plan import manifest_of
from lab.report import ScenarioVerdict
from lab.run_record import RunRecord
from lab.scenario import parse
from lab.script import script_of
from lab.stages import page_argument
from p2ptrain.base.errors import DeviceError, HomeError, UserError
from peer.testnet.plan import lay_out
from sim.errors import ScenarioError

DOCKER = """#!{python}
import json, os, sys
with open(os.environ["ASKED"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == os.environ.get("FAILS"):
    print(os.environ["WHY"], file=sys.stderr)
    sys.exit(1)
if sys.argv[1] == "inspect":
    print("true")
if sys.argv[1] == "ps":
    print("abc\\ndef")
if sys.argv[1:3] == ["network", "ls"]:
    print("ghi")
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which the fake docker records its calls."""
    tool = tmp_path / "bin" / "docker"
    tool.parent.mkdir()
    tool.write_text(DOCKER.replace("{python}", sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    return tmp_path / "asked"


def calls(asked: Path) -> list[list[str]]:
    return [json.loads(line) for line in asked.read_text().splitlines()]


def name_of(command: list[str]) -> str:
    return command[command.index("--name") + 1]


def stage(tiny: dict[str, Any], out: Path) -> Containers:
    tiny["peers"][1] |= {"up_mbit_s": 5, "down_mbit_s": 20}
    return Containers(script_of(parse(tiny)), out, "0123456789abcdef")


def test_a_command_becomes_a_container(asked: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    containers_of = stage(tiny, tmp_path / "out")
    command = containers_of.inside("home-1", "home-1")(sys.executable, "-P", "-m", "peer", "link")
    assert command[1] == "run"
    assert command[-5:] == ["p2ptrain-testnet-peer", "-P", "-m", "peer", "link"]
    assert command[command.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert "NET_ADMIN" not in command
    assert "NET_ADMIN" in containers_of.inside("office-1", "office-1")("python", "-V")
    assert "p2ptrain-testnet-bootstrap" in containers_of.inside("bootstrap", "bootstrap")("python", "-V")
    assert "--no-healthcheck" in command
    assert command[command.index("--pull") + 1] == "never"  # these images are not in any registry
    assert command[command.index("--workdir") + 1] == "/tmp"  # the image's own folder belongs to another user
    assert calls(asked)[1][:2] == ["network", "create"]
    for labelled in (command, calls(asked)[1]):  # the label by which the next testnet finds what this one left
        assert f"{containers.FOLDER_LABEL}={tmp_path / 'out'}" in labelled


def test_a_folder_is_mounted_where_it_is_whatever_its_name(asked: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    """``--volume`` would take a colon for the end of the path."""
    out = tmp_path / "12:30 at noon"
    containers.check_folder(out)
    command = stage(tiny, out).inside("home-1", "home-1")(sys.executable, "-m", "peer")
    assert command[command.index("--mount") + 1] == f"type=bind,source={out},target={out}"
    assert "--volume" not in command


def test_the_page_is_published_to_this_computer_only(
    asked: Path, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is published at one port of the loopback, and its token is on no command line."""
    shown = Containers(script_of(parse(tiny)), tmp_path, "0123456789abcdef", "8080")
    assert shown.page == ["--page", "0.0.0.0:8080"]
    command = shown.inside("bootstrap", "bootstrap")("python", "-m", "bootstrap")
    assert command[command.index("--publish") + 1] == "127.0.0.1:8080:8080"
    environment = [command[place + 1] for place, word in enumerate(command) if word == "--env"]
    assert "P2PTRAIN_PAGE_TOKEN" in environment
    assert "P2PTRAIN_PAGE_HOSTS=127.0.0.1,localhost" in environment
    assert "--publish" not in shown.inside("home-1", "home-1")("python", "-m", "peer")
    unseen = stage(tiny, tmp_path)
    assert unseen.page == ()
    assert "--publish" not in unseen.inside("bootstrap", "bootstrap")("python", "-m", "bootstrap")


def test_a_port_for_the_page_is_found_before_anything_is_built(asked: Path, tmp_path: Path) -> None:
    """A free port must be found on this computer: a container's port means nothing outside."""
    testnet_toml = containers.SOURCE / "docker" / "testnet.toml"
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = str(busy.getsockname()[1])
        with pytest.raises(UserError, match=f"127.0.0.1:{taken}: Address already in use"):
            run_scenario(testnet_toml, (), "docker", tmp_path / "out", 1, taken)
    with pytest.raises(UserError, match=r"only published at 127\.0\.0\.1"):
        run_scenario(testnet_toml, (), "docker", tmp_path / "out", 1, "0.0.0.0:8080")
    assert {call[0] for call in calls(asked)} == {"version"}
    assert page_argument("", "docker") == ""
    assert 1024 <= int(page_argument("0", "docker")) <= 65535


@pytest.mark.parametrize("name", ["a,b", 'say "hello"', "two\nlines"])
def test_a_folder_that_docker_would_misread_is_refused_before_anything_is_built(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(HomeError, match="comma") as caught:
        run_scenario(containers.SOURCE / "docker" / "testnet.toml", (), "docker", tmp_path / name, 1)
    assert "--out" in caught.value.remedy
    assert [call[0] for call in calls(asked)] == ["version"]
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("security", "options"),
    [
        ("[name=seccomp,profile=builtin name=cgroupns]", "--user {me}"),
        ("[name=seccomp,profile=default name=rootless]", "--user 0:0"),
        ("[name=userns]", "--user {me} --userns host"),
        ("[name=seccomp,profile=builtin name=selinux]", "--security-opt label=disable --user {me}"),
    ],
)
def test_homes_are_written_as_our_user_by_every_kind_of_engine(security: str, options: str) -> None:
    assert containers.owner(security) == options.format(me=f"{os.getuid()}:{os.getgid()}").split()


def test_links_suspensions_and_deaths_are_those_of_containers(
    asked: Path, tiny: dict[str, Any], tmp_path: Path
) -> None:
    containers_of = stage(tiny, tmp_path)
    names = {who: name_of(containers_of.inside(who, who)("python")) for who in ("home-1", "office-1")}
    office, home = names["office-1"], names["home-1"]
    assert office.endswith("-2")
    asked.write_text("")
    group = {part.name: part.settings for part in containers_of.script.peers}
    containers_of.started("home-1", group["home-1"])
    containers_of.started("bootstrap", None)
    assert calls(asked) == []
    containers_of.started("office-1", group["office-1"])
    assert calls(asked)[-1][-4:] == ["sh", "/usr/local/bin/p2ptrain-line", "5", "20"]
    suspension = containers_of.suspend("home-1", 1)
    suspension.end()
    suspension.end()
    assert [call[1:2] + call[-1:] for call in calls(asked)[-2:]] == [[home, "kill -STOP -1"], [home, "kill -CONT -1"]]
    containers_of.kill("home-1", 1)
    assert calls(asked)[-1] == ["kill", home]


def test_links_have_delay_and_loss_of_the_scenario(asked: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    tiny["peers"][0] |= {"latency_s": 0.02, "packet_loss": 0.005}
    containers_of = stage(tiny, tmp_path)
    assert "NET_ADMIN" in containers_of.inside("home-1", "home-1")("python")
    containers_of.started("home-1", next(part.settings for part in containers_of.script.peers if part.name == "home-1"))
    # Only what leaves is delayed: 40 ms there and none back, in place of 20 ms each way.
    assert calls(asked)[-1][-6:] == ["/usr/local/bin/p2ptrain-line", "", "", "40", "0.5", "both"]


def test_a_default_latency_is_not_set(tiny: dict[str, Any]) -> None:
    group = parse(tiny).peers[0]
    assert group.latency_s > 0  # as simulated
    assert containers.line_of(group) == []


@pytest.mark.parametrize(("said", "found"), [("yes\n", True), ("no\n", False), ("", False)])
def test_kernel_support_for_netem_is_tried_once(said: str, found: bool) -> None:
    asked_for: list[tuple[str, ...]] = []

    def run(*arguments: str) -> str:
        asked_for.append(arguments)
        return said

    assert containers.has_netem(run) is found
    assert containers.has_netem(run) is found
    [words] = asked_for
    assert words[:2] == ("run", "--rm")
    assert "NET_ADMIN" in words
    assert "timeout 20 sh /usr/local/bin/p2ptrain-line" in words[-1]
    assert f" {containers.LINE}\n" in (containers.SOURCE / "docker" / "Dockerfile").read_text()


def test_a_failing_engine_is_no_answer_about_netem() -> None:
    def run(*arguments: str) -> str:
        raise DeviceError("docker run failed: no such image", "Mend it.")

    for _ in range(2):  # a failure is not cached
        with pytest.raises(DeviceError):
            containers.has_netem(run)


def test_without_netem_delayed_links_are_rejected_before_anything_is_removed(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    containers.has_netem.cache_clear()
    path = containers.SOURCE / "docker" / "testnet.toml"
    with pytest.raises(ScenarioError, match=r"^peers\.narrow\.latency_s: stage docker does not support this"):
        run_scenario(path, ["peers.narrow.latency_s=0.05"], "docker", tmp_path / "out", 1)
    containers.has_netem.cache_clear()
    assert [call[0] for call in calls(asked)] == ["version", "build", "build", "run"]
    assert not (tmp_path / "out").exists()


def test_a_failing_engine_is_an_error_and_may_be_asked_again(
    asked: Path, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    containers_of = stage(tiny, tmp_path)
    name = name_of(containers_of.inside("home-1", "home-1")("python"))
    suspension = containers_of.suspend("home-1", 1)
    monkeypatch.setenv("WHY", "it is not running")
    for fails, does in (("kill", lambda: containers_of.kill("home-1", 1)), ("exec", suspension.end)):
        monkeypatch.setenv("FAILS", fails)
        with pytest.raises(DeviceError, match=f"docker {fails} failed: it is not running"):
            does()
    monkeypatch.delenv("FAILS")
    suspension.end()
    assert calls(asked)[-1] == ["exec", name, "sh", "-c", "kill -CONT -1"]


def test_leftover_containers_are_counted_and_removed(asked: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    containers_of = stage(tiny, tmp_path)
    assert containers_of.count_left() == 2
    containers_of.close()
    assert ["rm", "--force", "--volumes", "abc", "def"] in calls(asked)


def test_leftovers_of_a_killed_testnet_are_removed_containers_first(asked: Path, tmp_path: Path) -> None:
    containers.sweep_folder(tmp_path / "out")
    mine = f"label={containers.FOLDER_LABEL}={tmp_path / 'out'}"
    assert [call[0] for call in calls(asked)] == ["ps", "rm", "network", "network"]
    assert calls(asked)[0][-1] == calls(asked)[2][-1] == mine
    assert calls(asked)[3] == ["network", "rm", "ghi"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError(), DeviceError("It hangs.", "Mend it.")])
def test_nothing_remains_whatever_ends_a_testnet(
    asked: Path, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Ctrl+C, SIGTERM and an engine that fails."""
    scenario, out = parse(tiny), tmp_path / "out"
    out.mkdir()
    lay_out(out, manifest_of(scenario), [part.name for part in script_of(scenario).peers])

    async def run_script(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(inner_main, "run_script", run_script)
    with pytest.raises((KeyboardInterrupt, DeviceError)):
        inner_main.run_inside(out, scenario, "docker", 1)
    assert [call[:2] for call in calls(asked)[-4:]] == [
        ["ps", "--all"],
        ["rm", "--force"],
        ["network", "ls"],
        ["network", "rm"],
    ]
    assert not (out / "course.json").exists()


def test_an_engine_that_fails_at_the_end_loses_no_record(
    asked: Path, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, out = parse(tiny), tmp_path / "out"
    out.mkdir()
    lay_out(out, manifest_of(scenario), [part.name for part in script_of(scenario).peers])

    async def run_script(*arguments: Any) -> RunRecord:
        monkeypatch.setenv("FAILS", "ps")
        monkeypatch.setenv("WHY", "the engine has gone")
        return RunRecord({}, [], [], [], True, 9.0, {}, {})

    monkeypatch.setattr(inner_main, "run_script", run_script)
    inner_main.run_inside(out, scenario, "docker", 1)
    record = inner_main.read_run(out)["course"]
    assert record["wall_s"] == 9.0
    # From counting and from removing.
    assert record["troubles"] == ["at the end: docker ps failed: the engine has gone"] * 2


def test_a_link_that_cannot_be_set_up_is_an_error(
    asked: Path, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    containers_of = stage(tiny, tmp_path)
    containers_of.inside("office-1", "office-1")
    settings = next(part.settings for part in containers_of.script.peers if part.name == "office-1")
    monkeypatch.setattr(containers, "START_S", 0.3)
    monkeypatch.setenv("FAILS", "inspect")
    monkeypatch.setenv("WHY", "no such container")
    with pytest.raises(DeviceError, match="its link could not be set up"):
        containers_of.started("office-1", settings)


@pytest.mark.parametrize(
    ("why", "problem", "remedy"),
    [
        ("permission denied while trying to connect", "does not let this user in", "usermod -aG docker"),
        ("Cannot connect to the Docker daemon", "No Docker engine answers", "systemctl start docker"),
    ],
)
def test_an_engine_that_does_not_answer_is_explained(
    asked: Path, monkeypatch: pytest.MonkeyPatch, why: str, problem: str, remedy: str
) -> None:
    monkeypatch.setenv("FAILS", "version")
    monkeypatch.setenv("WHY", why)
    with pytest.raises(DeviceError) as caught:
        check_engine()
    assert problem in caught.value.problem
    assert "docker version failed" not in caught.value.problem
    assert remedy in caught.value.remedy


def test_a_missing_docker_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="not installed"):
        check_engine()


def test_images_are_built_of_the_clone(asked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(containers.BUILD_VARIABLE, "--network host --build-arg 'A=b c'")
    build()
    assert [call[call.index("--target") + 1] for call in calls(asked)] == ["bootstrap", "peer"]
    assert all("A=b c" in call for call in calls(asked))
    monkeypatch.setenv("FAILS", "build")
    monkeypatch.setenv("WHY", "no route to host")
    with pytest.raises(DeviceError, match="could not be built"):
        build()
    monkeypatch.setattr(containers, "SOURCE", tmp_path)
    with pytest.raises(DeviceError, match="Dockerfile does not exist"):
        build()


def test_a_killed_peer_has_rejoined_once_it_exchanges_again(tmp_path: Path) -> None:
    killed, well = {"status": -9, "ended_by_us": "is killed"}, {"status": 0, "ended_by_us": ""}
    home = tmp_path / "anna"
    home.mkdir()

    def noted(*kinds: str) -> None:
        (home / "events.jsonl").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in kinds) + '{"kind')

    lives = {"anna": [killed, well], "bert": [well], "carl": [killed]}
    noted("listening", "exchanged", "listening", "progress")
    assert container_summary.rejoined(lives, tmp_path, {"anna"}) is False
    torn = '{"kind": "exch{"kind": "listening"}\n'
    (home / "events.jsonl").write_text('{"kind": "listening"}\n' + torn + '{"kind": "exchanged"}\n')
    assert container_summary.rejoined(lives, tmp_path, {"anna"}) is True
    noted("listening", "listening", "exchanged")
    assert container_summary.rejoined(lives, tmp_path, {"anna"}) is True
    assert container_summary.rejoined(lives, tmp_path, {"anna", "carl"}) is False, "it was to come back, and never did"
    assert container_summary.rejoined({"bert": [well]}, tmp_path, {"bert"}) is None
    assert (
        container_summary.rejoined({"anna": [killed, well], "bert": [well]}, tmp_path / "elsewhere", {"anna"}) is False
    )


def test_a_testnet_whose_killed_peer_stays_away_has_not_passed(
    asked: Path, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny["peers"][0] |= {"count": 1, "leaves_at_s": 5, "leaves": "killed", "returns_after_s": 1, "returns": "resumed"}
    scenario = parse(tiny)
    script = script_of(scenario)
    out = tmp_path / "out"
    out.mkdir()
    lay_out(out, manifest_of(scenario), [part.name for part in script.peers])
    away = {"status": -9, "ended_by_us": "is killed"}
    record = {"lives": {part.name: [away] for part in script.peers}, "cut_short": False, "wall_s": 9.0}
    console = Console(file=io.StringIO(), width=120)
    beyond = container_summary.write_summary(out, script, record, (), 1, console)
    assert any("has not returned" in each for each in beyond)
    document = json.loads((out / "summary.json").read_text())
    assert document["killed_peer_rejoined"] is False
    assert document["passed"] is False
    assert document["failures"] == beyond


def test_faults_beyond_the_limits_are_reported(asked: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    """Check a scenario without limits: peers without a summary and weights are reported all the same."""
    scenario = parse(tiny)
    script = script_of(scenario)
    out = tmp_path / "out"
    out.mkdir()
    lay_out(out, manifest_of(scenario), [part.name for part in script.peers])
    well = {"status": 0, "ended_by_us": ""}
    record = {"lives": {part.name: [well] for part in script.peers}, "cut_short": False, "wall_s": 9.0}
    beyond = container_summary.write_summary(out, script, record, ("known",), 1, Console(file=io.StringIO(), width=120))
    assert any("averaged model could not be measured" in each for each in beyond)
    assert any("summary" in each for each in beyond)
    assert "known" not in beyond
    verdict = ScenarioVerdict("tiny", "docker", True, {"peers": {}}, {}, [], []).with_faults(beyond)
    assert (verdict.passed, verdict.faults) == (False, beyond)
    assert ScenarioVerdict("tiny", "docker", True, {"peers": {}}, {}, [], []).with_faults([]).passed


def test_an_engine_that_hangs_is_one_line(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = asked.parent / "bin" / "docker"
    tool.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    monkeypatch.setattr(containers, "COMMAND_DEADLINE_S", 0.2)
    with pytest.raises(DeviceError, match=r"^The Docker engine did not answer") as caught:
        check_engine()
    assert "restart docker" in caught.value.remedy


@pytest.mark.parametrize(("status", "said"), [(1, "skipped"), (0, "running")])
def test_the_tests_say_in_one_line_whether_containers_were_run(
    asked: Path, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    for name, text in (("docker", f"exit {status}"), ("make", 'echo "$@" >> "$ASKED"')):
        tool = asked.parent / "bin" / name
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
    script = containers.SOURCE / ".ci" / "docker"
    done = subprocess.run([str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout
    assert done.stdout.count("\n") == (1 if status else 2)  # a line for each part
    asked_for = asked.read_text().split() if asked.exists() else []
    assert asked_for == ([] if status else ["docker-testnet", "docker-check"])
    assert f"timeout {containers.COMMAND_DEADLINE_S:.0f} docker version" in script.read_text()  # it may hang
