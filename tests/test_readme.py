"""The commands of README.md and of the how-to pages work.

Blocks fenced as ``sh tested`` are executed in order of need, with four changes:

- the swarm is on this machine alone (``--local``), and HOME is a temporary directory;
- the example link and the example home are replaced by real ones;
- the manifest, which readers edit before they sign it, gets a tiny model and a run without an end;
- a testnet has two peers, trains for a few seconds, and its page has a port of its own.

The arguments of all other ``p2ptrain`` commands, in every document, are parsed. ``.ci/docker`` runs the Docker commands
if an engine answers, and tests/lab/test_docker_docs.py compares docs/DOCKER.md with the files of docker/.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from p2ptrain.cli import cli
from p2ptrain.manifest import JoinLink, parse_toml, render_toml, with_changes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("JOIN", "START", "TRY"))]
"""User documentation, whose blocks marked as tested are executed."""


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return the words after ``sh`` on the fence, and the content, of each shell block of a page."""
    return re.findall(r"^```sh([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]

SMALL = {
    "run.tokens": 10**9,
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 1,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 2,
    "training.schedule": "constant",
    "training.warmup_tokens": 3_000,
}
"""Changes to the manifest that ``init`` writes, so that steps and losses take moments."""

DEADLINE_S = 120.0
"""Timeout of each wait, in seconds. It bounds a hanging test, and measures nothing."""


def lines_of(block: str) -> list[list[str]]:
    """Return the words of each command line of a block, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def commands(tested: bool) -> list[list[str]]:
    """Return every command line of the pages' blocks that are marked as tested, or of all others."""
    chosen = [block for info, block in BLOCKS if (info.strip() == "tested") is tested]
    return [words for block in chosen for words in lines_of(block)]


def command(*begins: str) -> list[str]:
    """Return the pages' only tested command that starts with these words after ``p2ptrain``."""
    found = [words for words in commands(tested=True) if words[1 : 1 + len(begins)] == list(begins)]
    assert len(found) == 1, f"the pages have {len(found)} tested commands that begin with {begins}"
    return found[0]


def test_every_command_of_ours_is_tested() -> None:
    names = sorted(words[1] for words in commands(tested=True))
    assert all(words[0] == "p2ptrain" for words in commands(tested=True))
    running = ["finish", "invite", "pause", "resume", "status"]
    private = ["invite", "revoke", "contributions"]
    starting = ["bootstrap", "doctor", "export", "generate", "init", "peer", "peer", "sign", "simulate", "testnet"]
    assert names == sorted([*running, *private, *starting])
    others = [words for words in commands(tested=False) if words[0] not in ("make", ".", "p2ptrain")]
    assert others == []


def shown(page: Path) -> list[list[str]]:
    """Return every p2ptrain command in a page's shell blocks, also behind sudo: its words after the program's name."""
    lines = [words for _, block in blocks_of(page) for words in lines_of(block)]
    bare = [words[1:] if words[0] == "sudo" else words for words in lines]
    return [words[1:] for words in bare if words[0] in ("p2ptrain", "$(command -v p2ptrain)")]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_arguments_that_a_document_shows_are_accepted(page: Path) -> None:
    for name, *arguments in shown(page):
        found = cli.get_command(click.Context(cli), name)
        assert found is not None, f"{page.name}: p2ptrain has no command {name}"
        found.make_parser(click.Context(found)).parse_args(list(arguments))


def test_make_demo_runs_the_testnet_that_runs_below() -> None:
    """Check its options: the defaults, without a time limit."""
    told = subprocess.run(
        ["make", "-n", "--no-print-directory", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    program, *words = shlex.split(told.splitlines()[-1])
    assert program.endswith("bin/p2ptrain")
    assert words == ["testnet", "--preset", "demo", "--out", "out/demo"]
    assert {name: option.default for name, option in options_of_testnet().items() if name in ("preset", "peers")} == {
        "preset": "demo",
        "peers": 3,
    }


def options_of_testnet() -> dict[str, click.Parameter]:
    found = cli.get_command(click.Context(cli), "testnet")
    assert found is not None
    return {str(each.name): each for each in found.params}


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {each for _, block in BLOCKS for each in re.findall(r"^make ([\w-]+)", block, flags=re.MULTILINE)}
    containers, figures = {"docker-testnet", "docker-check"}, {"bench", "results"}
    assert targets == {"demo", "demo-team", "install", "test", "lab", "soak", "check", "fuzz"} | containers | figures
    for each in targets:
        assert re.search(rf"^{each}:", makefile, flags=re.MULTILINE), f"the Makefile has no target {each}"


@dataclass(slots=True)
class Running:
    """A command that runs until it is stopped."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert self.process.poll() is None, f"it ended while {what} was awaited:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"{what} never came:\n{self.log.read_text()}"
            time.sleep(0.1)

    def end(self) -> str:
        """Wait for a successful end, and return the output."""
        status = self.process.wait(DEADLINE_S)
        assert status == 0, self.log.read_text()
        return self.log.read_text()

    def stop(self) -> None:
        """Send one Ctrl+C, and wait for a successful end."""
        self.process.send_signal(signal.SIGINT)
        self.end()


@dataclass(slots=True)
class Shell:
    """A user's shell: a directory, a HOME, and the virtual environment on the PATH."""

    folder: Path
    started: list[Running]

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "HOME": str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        return {**os.environ, **own}

    def run(self, words: list[str]) -> str:
        """Run a command to its end, and return its output."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=2 * DEADLINE_S
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def refused(self, words: list[str]) -> str:
        """Run a command that fails since it has nothing to do yet, and return its message."""
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stderr

    def start(self, words: list[str]) -> Running:
        log = self.folder / f"{len(self.started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.started.append(Running(process, log))
        return self.started[-1]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path, [])
    try:
        yield made
    finally:
        for each in made.started:
            if each.process.poll() is None:
                each.process.terminate()
        for each in made.started:
            try:
                each.process.wait(30)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()


def make_small(shell: Shell) -> None:
    manifest = shell.folder / "my-run" / "manifest.toml"
    manifest.write_text(render_toml(with_changes(parse_toml(manifest.read_text(encoding="utf-8")), SMALL)))


def notes(home: Path, kind: str) -> int:
    """Return how often a peer has noted something."""
    try:
        lines = (home / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    return sum(json.loads(line)["kind"] == kind for line in lines if line.endswith("}"))


def free_port() -> int:
    """Return a port below the kernel's ephemeral ones, so that it stays free."""
    for port in random.sample(range(20_000, 30_000), 50):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@pytest.mark.net
@pytest.mark.timeout(600)
def test_the_commands_run(shell: Shell) -> None:
    shell.run(command("init"))
    make_small(shell)
    assert "run" in shell.run(command("sign"))
    bootstrap = shell.start([*command("bootstrap"), "--local"])
    link_file = shell.folder / "my-run" / "bootstrap" / "join-link.txt"
    bootstrap.wait_for(link_file.exists, "the join link")
    link = JoinLink.parse(link_file.read_text(encoding="utf-8"))

    assert command("doctor")[2].startswith("p2ptrain://")
    free = free_port()
    doctor = shell.start(["p2ptrain", "doctor", str(link), "--local", "--port", str(free)])  # it mostly waits

    join = [word for word in commands(tested=True) if word[1] == "peer" and word[2].startswith("p2ptrain://")]
    assert len(join) == 1
    first = shell.start(["p2ptrain", "peer", str(link), "--local"])
    home = shell.folder / ".p2ptrain" / link.run_id[:12]
    first.wait_for(lambda: notes(home, "progress") > 0, "training")
    first.stop()
    assert f"others can dial this machine at 127.0.0.1:{free}" in doctor.end()

    def at_home(words: list[str]) -> list[str]:
        """Return the words with the real home in place of the pages' example."""
        real = [str(home) if word.startswith("~/.p2ptrain/") else word for word in words]
        assert real != words
        return real

    second = shell.start([*at_home(command("peer", "--home")), "--local"])
    second.wait_for(lambda: notes(home, "resumed") > 0 and notes(home, "started") > 1, "resuming")
    invited = JoinLink.parse(shell.run(at_home(command("invite", "~/.p2ptrain/5f0c…"))))
    assert invited.run_id == link.run_id
    assert link.addresses[0] in invited.addresses
    second.wait_for(lambda: notes(home, "first inner step") > 1, "training")
    shell.run(at_home(command("pause")))
    second.wait_for(lambda: notes(home, "held") > 0, "the trainer's rest")
    assert "paused" in shell.run(at_home(command("status")))
    shell.run(at_home(command("resume")))
    second.wait_for(lambda: notes(home, "goes on") > 0, "training")
    shell.run(at_home(command("finish")))
    second.end()
    bootstrap.stop()

    assert "no receipt" in shell.refused(at_home(command("contributions")))  # it had no partner
    exporting = shell.start(at_home(command("export")))
    generate = at_home(command("generate"))
    assert shell.run([*generate, "--tokens", "5"]).startswith(generate[-1])
    exporting.end()
    assert (shell.folder / "my-model" / "config.json").exists()


def watched(testnet: Running) -> dict[str, Any]:
    """Return the page's document once both peers have reported themselves and an exchange."""
    document: dict[str, Any] = {"peers": [], "exchanges": []}

    def told() -> bool:
        found = re.search(r"watch them at (http://127\.0\.0\.1:\d+/)", testnet.log.read_text())
        if found is not None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{found[1]}status", timeout=10) as answer:
                document.update(json.load(answer))
        return len([row for row in document["peers"] if row["tokens"]]) == 2 and bool(document["exchanges"])

    testnet.wait_for(told, "an exchange on the page")
    return document


@pytest.mark.net
def test_the_testnet_trains_and_its_report_tells(shell: Shell) -> None:
    """Check one bootstrap, two peers that train together, one that trains alone, and the page that shows them."""
    (shell.folder / "p2ptrain").mkdir()  # a folder as in a clone, which must not be imported
    words = command("testnet")
    for option, fewer in {"--peers": "2", "--seconds": "12", "--page": "0"}.items():
        words[words.index(option) + 1] = fewer
    testnet = shell.start([*words, "--seed", "5"])
    seen = watched(testnet)
    printed = testnet.end()
    assert {row["nickname"] for row in seen["peers"]} == {"peer-1", "peer-2"}
    assert all(row["device"] == "cpu" for row in seen["peers"])
    assert seen["join"].endswith(" --local")

    assert "Disagreement of the peers" in printed
    out = shell.folder / words[words.index("--out") + 1]
    summary = json.loads((out / "summary.json").read_bytes())
    assert summary["passed"]
    assert summary["cut_short"]
    assert summary["seed"] == 5
    assert len(summary["peers"]) == 2
    for peer in summary["peers"]:
        assert peer["tokens"] > 0
        assert peer["exchanges_ok"] >= 1
        assert peer["val_loss_last"] < peer["val_loss_first"]
    assert summary["averaged_val_loss"] < summary["peers"][0]["val_loss_first"]
    assert summary["solo_val_loss"] < summary["peers"][0]["val_loss_first"]
    assert 0 <= summary["final_disagreement"] < 1
    assert summary["sample"] in printed
    assert "To be, or not" in shell.run(["p2ptrain", "generate", str(out / "peer-1"), "To be, or not"])


def test_the_simulation_runs() -> None:
    _, *words = command("simulate")
    program = [sys.executable, "-m", "p2ptrain.cli", *words]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "exchanges made" in ended.stdout


@pytest.mark.net
def test_the_commands_for_a_run_by_invite(shell: Shell) -> None:
    shell.run(command("init"))
    manifest = shell.folder / "my-run" / "manifest.toml"
    manifest.write_text(manifest.read_text().replace('policy = "open"', 'policy = "invite"'))
    shell.run(command("sign"))
    bootstrap = shell.start([*command("bootstrap"), "--local"])
    link_file = shell.folder / "my-run" / "bootstrap" / "join-link.txt"
    bootstrap.wait_for(link_file.exists, "the join link")
    printed = JoinLink.parse(link_file.read_text(encoding="utf-8"))

    invited = JoinLink.parse(shell.run(command("invite", "my-run")))
    assert invited.addresses == printed.addresses
    assert invited.invite
    somebody = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    *revoke, example = command("revoke")
    assert example == "12D3KooW…"
    assert f"banned: {somebody}" in shell.run([*revoke, somebody])
    bootstrap.wait_for(lambda: "1 banned" in bootstrap.log.read_text(), "the bootstrap's word")
    bootstrap.stop()
