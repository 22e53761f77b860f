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
PROFILES = {each for service in COMPOSE["services"].values() for each in service.get("profiles", [])}

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


def check_docker(words: list[str]) -> None:
    """Check the arguments after ``docker``, as far as they are ours."""
    match words:
        case ["compose", *rest]:
            for option, known in {"-f": None, "--profile": PROFILES}.items():
                for at in [place for place, word in enumerate(rest) if word == option]:
                    assert rest[at + 1] in known if known else (ROOT / rest[at + 1]).exists()
            if "exec" in rest:
                check_program(rest[rest.index("exec") + 4 :])
        case ["build", *rest] if "-t" in rest:
            target = rest[rest.index("--target") + 1]
            assert f" AS {target}\n" in DOCKERFILE
            assert IMAGES[rest[rest.index("-t") + 1]] == target
        case ["run", *rest]:
            place = next(number for number, word in enumerate(rest) if word in IMAGES)
            check_ours(IMAGES[rest[place]], rest[place + 1 :])
            assert "--init" in rest[:place]  # else signals have no effect during the start
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


def test_every_variable_is_told() -> None:
    assert [name for name in sorted(variables()) if f"`{name}" not in DOCUMENT and f"{name}=" not in DOCUMENT] == []
    assert containers.BUILD_VARIABLE in DOCUMENT
    asked = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, flags=re.MULTILINE))
    told = set(re.findall(r"^- `([A-Z_]+)` \(", DOCUMENT, flags=re.MULTILINE))
    assert told == asked == set(COMPOSE["x-build"]["args"])
