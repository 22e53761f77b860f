"""Commands of docs/DOCKER.md: their files, services, profiles, variables and options exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from lab import containers
from p2ptrain.cli import cli

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = (ROOT / "docs" / "DOCKER.md").read_text(encoding="utf-8")
COMPOSE_TEXT = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
ENTRY = (ROOT / "docker" / "entry.sh").read_text(encoding="utf-8")

BLOCKS = re.findall(r"^```sh\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", DOCUMENT, flags=re.DOTALL))
PROGRAM = ["python3", "-m", "p2ptrain.cli"]
IMAGES = {"p2ptrain-peer": "peer", "p2ptrain-bootstrap": "bootstrap"}
"""Program that each image runs; options behind the image's name are for that command."""


def commands() -> list[list[str]]:
    """Return the commands of all blocks, and those in the text with arguments."""
    lines = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(each.split()) for each in INLINE if re.match(r"docker \S+ \S|sysctl |make ", each)]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def variables() -> set[str]:
    """Return the variables that the compose file takes from the environment."""
    return set(re.findall(r"\$\{(\w+)", COMPOSE_TEXT))


def check_ours(name: str, arguments: list[str]) -> None:
    """Check that one of our commands takes these arguments. Raises click.UsageError."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    command.make_parser(click.Context(command)).parse_args(list(arguments))


def check_program(words: list[str]) -> None:
    """Check a program that is run in a container, if it is ours."""
    if words[:3] == PROGRAM:
        check_ours(words[3], words[4:])


def check_compose(words: list[str]) -> None:
    """Check the arguments after ``docker compose``."""
    assert words[:4] == ["-p", "p2ptrain", "-f", "docker/compose.yaml"]
    rest = words[4:]
    if rest[0] == "-f":
        assert rest[1] == "docker/compose.gpu.yaml"
        rest = rest[2:]
    while rest[0] == "--profile":
        assert any(rest[1] in service.get("profiles", []) for service in COMPOSE["services"].values()), rest[1]
        rest = rest[2:]
    action, *options = rest
    match action:
        case "up":
            scaled = [each for each in options if not each.startswith("-")]
            assert all(each.partition("=")[0] in COMPOSE["services"] for each in scaled)
            assert set(options) - set(scaled) <= {"--build", "--scale"}
        case "down":
            assert options in ([], ["--volumes"])
        case "start" | "logs":
            assert set(options) <= set(COMPOSE["services"])
        case "exec":
            assert options[:2] == ["--index", "1"]
            assert options[2] in COMPOSE["services"]
            check_program(options[3:])
        case _:
            raise AssertionError(action)


def check_docker(words: list[str]) -> None:
    """Check the arguments after ``docker``, as far as they are ours."""
    match words:
        case ["compose", *rest]:
            check_compose(rest)
        case ["build", *rest] if "-t" in rest:
            assert (ROOT / rest[rest.index("-f") + 1]).exists()
            target = rest[rest.index("--target") + 1]
            assert f" AS {target}\n" in DOCKERFILE
            assert IMAGES[rest[rest.index("-t") + 1]] == target
        case ["run", *rest]:
            place = next(number for number, word in enumerate(rest) if word in IMAGES)
            check_ours(IMAGES[rest[place]], rest[place + 1 :])
            assert "--init" in rest[:place]  # else signals have no effect during the start
            for variable in re.findall(r"-e (\w+)=", " ".join(rest[:place])):
                assert f"{variable}:-" in ENTRY, variable
        case ["exec", *rest]:
            check_program([word for word in rest if word != "-i"][1:])


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_each_command_is_as_it_stands_there(words: list[str]) -> None:
    while "=" in words[0]:
        assert words[0].partition("=")[0] in variables(), words[0]
        words = words[1:]
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        case ["docker", *rest]:
            check_docker(rest)
        case _:
            assert words[0] in ("mkdir", "sysctl"), words


def test_the_collector_sees() -> None:
    kinds = {tuple(words[:2]) for words in commands()}
    wanted = {"compose", "build", "run", "exec", "logs", "cp", "ps", "system", "network"}
    assert {("docker", each) for each in wanted} | {("make", "docker-testnet")} <= kinds


def test_options_behind_an_image_in_the_text_are_taken() -> None:
    found = [words for each in INLINE if " p2ptrain-peer --" in each for words in [shlex.split(each)]]
    assert found
    for words in found:
        check_ours("peer", words[words.index("p2ptrain-peer") + 1 :])


def test_every_variable_is_told() -> None:
    assert [name for name in sorted(variables()) if f"`{name}" not in DOCUMENT and f"{name}=" not in DOCUMENT] == []
    assert containers.BUILD_VARIABLE in DOCUMENT
    asked = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, flags=re.MULTILINE))
    told = set(re.findall(r"^- `([A-Z_]+)` \(", DOCUMENT, flags=re.MULTILINE))
    assert told == asked == set(COMPOSE["x-build"]["args"])


def test_every_profile_is_told() -> None:
    profiles = {each for service in COMPOSE["services"].values() for each in service.get("profiles", [])}
    told = DOCUMENT.partition("`--profile` adds:\n\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^- `(\w+)`:", told, flags=re.MULTILINE)) == profiles


def test_networks_are_told_as_they_are() -> None:
    for variable in ("BACKBONE", "HOME_NETWORK"):
        match = re.search(rf"\${{{variable}:-([\d.]+)}}", COMPOSE_TEXT)
        assert match is not None
        assert f"{match[1]}.0/24" in DOCUMENT


@pytest.mark.parametrize(
    "words",
    [
        "port is already allocated",
        "Pool overlaps with other one on this address space",
        "permission denied while trying to connect",
        "Cannot connect to the Docker daemon",
        "is there a network?",
        "could not select device driver",
        "without IPv4",
    ],
)
def test_usual_causes_are_where_messages_say(words: str) -> None:
    source = (ROOT / "lab" / "containers.py").read_text(encoding="utf-8")
    assert source.count('docs/DOCKER.md, "Usual causes"') == 2
    assert words in DOCUMENT.partition("\n## Usual causes\n")[2]
