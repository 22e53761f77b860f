"""Test docker/compose.yaml with all its profiles on a real engine; called by ``.ci/docker``.

The check starts a Compose project of its own. All services must become healthy and all peers must exchange; the page
must require its token; after a peer and then the bootstrap are killed, the others must continue; the bootstrap must
return with the same join link; a stopped peer must save and exit cleanly. The project is always removed at the end.

Needs a Docker engine and ``docker compose`` or docker-compose; no Python packages. Exit status: 0 passed; 1 failed,
with the reason and the end of every log, or a requirement is missing; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROJECT = "p2ptrain-check"
FILE = Path(__file__).parent / "compose.yaml"
PROFILES = ("slow", "nat", "adversary")
SERVICES = {"bootstrap": 1, "peer": 2, "slow": 1, "router": 1, "hidden": 1, "adversary": 1}
"""Number of containers of each service."""
HONEST = ("peer", "slow", "hidden")
HOME = "/data/peer"
USER = "10001"
"""User ID that owns the homes in the images."""
TOKENS = "30_000_000"
"""Length of the run; the demo's own would end within two minutes on a fast machine."""
BUILD_VARIABLE = "P2PTRAIN_DOCKER_BUILD"
"""Environment variable with options of ``docker build`` for the testnet in containers; also applied to Compose."""
MORE = 3
"""Exchanges that each remaining peer must make after a container was killed."""

UP_S = 900.0
"""Deadline for building from nothing and a healthy bootstrap; 6 min with downloads. Guess: measure a slow network."""
HEALTHY_S = 180.0
"""Deadline for all to be healthy; the first health check is after 30 s. Guess: measure a slow machine."""
EXCHANGES_S = 120.0
"""Deadline for exchanges; five peers on two cores make several a minute. Guess: measure a slow machine."""
COMMAND_S = 120.0
"""Deadline for one docker command; a stopping peer may take 60 s. Guess: measure a slow machine."""
POLL_S = 2.0
LINES = 15
"""Lines of each log that a failure shows."""


class CheckError(Exception):
    """A failed expectation; the message says which."""


class Swarm:
    """The Compose project. ``down`` removes all of it and is safe at any time."""

    def __init__(self, compose: Sequence[str], environment: Mapping[str, str]) -> None:
        profiles = [word for name in PROFILES for word in ("--profile", name)]
        self._compose = [*compose, "-p", PROJECT, "-f", str(FILE), *profiles]
        self._environment = environment

    def compose(self, *arguments: str, most_s: float = COMMAND_S) -> None:
        call([*self._compose, *arguments], most_s, self._environment)

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
        if left := self.containers():
            raise CheckError(f"docker compose down left containers: {', '.join(map(told, left))}")

    def containers(self) -> list[dict[str, Any]]:
        """Return all containers of the project, stopped ones too, in the form of ``docker inspect``."""
        ids = docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
        found: list[dict[str, Any]] = json.loads(docker("inspect", *ids)) if ids else []
        return sorted(found, key=lambda each: str(each["Name"]))

    def of(self, *services: str) -> list[str]:
        """Return the ids of the running containers of these services."""
        return [each["Id"] for each in self.containers() if service(each) in services and each["State"]["Running"]]


def check(swarm: Swarm, port: int, token: str) -> None:
    """Run the whole check. Raises CheckError."""
    say("building the images and starting the bootstrap")
    swarm.compose("up", "--build", "--detach", "--scale", f"peer={SERVICES['peer']}", most_s=UP_S)
    say("waiting until all services are healthy")
    until(lambda: missing_health(swarm.containers()), HEALTHY_S)
    homes_are_the_users(swarm.of(*HONEST))
    [bootstrap], [hidden], [slow] = swarm.of("bootstrap"), swarm.of("hidden"), swarm.of("slow")
    if " tbf " not in (line := docker("exec", slow, "tc", "qdisc", "show", "dev", "eth0")):
        raise CheckError(f"the link of {slow[:12]} is not slow: {line.strip()}")
    say("waiting until all peers exchange and the page shows it")
    until(lambda: missing_on_the_page(port, token), EXCHANGES_S)
    page_opens(port, token)
    killed, kept = swarm.of("peer")
    link = docker("exec", bootstrap, "cat", "/swarm/join-link.txt")
    for name, victim in (("a peer", killed), ("the bootstrap", bootstrap)):
        docker("kill", victim)
        say(f"{name} was killed; waiting until the others have made {MORE} more exchanges")
        go_on([kept, slow, hidden])
    say("starting the bootstrap again")
    docker("start", bootstrap)
    until(lambda: missing_health([each for each in swarm.containers() if each["Id"] == bootstrap], 1), HEALTHY_S)
    if docker("exec", bootstrap, "cat", "/swarm/join-link.txt") != link:
        raise CheckError("the bootstrap came back with another join link")
    say("stopping a peer")
    docker("stop", "--time", "60", kept)
    has_saved(next(each for each in swarm.containers() if each["Id"] == kept))


def missing_health(containers: Sequence[Mapping[str, Any]], expected: int = sum(SERVICES.values())) -> str:
    """Return what is not healthy yet; empty if all is. Raises CheckError if a container has exited."""
    if ended := [told(each) for each in containers if each["State"]["Status"] == "exited"]:
        raise CheckError(f"exited by itself: {', '.join(ended)}")
    well = [each for each in containers if is_well(each)]
    if len(well) == expected and all(each["State"]["Running"] for each in well):
        return ""
    return f"not healthy: {', '.join(told(each) for each in containers if each not in well) or 'no container started'}"


def is_well(container: Mapping[str, Any]) -> bool:
    """Return whether a container is healthy; only the router has no health check."""
    unchecked = {"Status": "healthy"} if service(container) == "router" else {"Status": "without a health check"}
    return bool(container["State"].get("Health", unchecked)["Status"] == "healthy")


def homes_are_the_users(ids: Sequence[str]) -> None:
    """Check that homes belong to the unprivileged user, also if a container starts as root. Raises CheckError."""
    for each in ids:
        if (owner := docker("exec", each, "stat", "-c", "%u", f"{HOME}/identity.key").strip()) != USER:
            raise CheckError(f"owner of the home of {each[:12]}: expected user {USER}, got {owner}")


def missing_on_the_page(port: int, token: str) -> str:
    """Return what the page does not show yet: every peer, figures of the honest ones, and one relayed path."""
    status, body = page(port, token)
    if status != 200:
        return f"the page: expected status 200, got {status}: {body.strip()}"
    here = [row for row in json.loads(body)["peers"] if row["state"] != "gone"]
    honest, trainers = sum(SERVICES[name] for name in HONEST), sum(SERVICES[name] for name in (*HONEST, "adversary"))
    telling = [row for row in here if row["exchanges"] and row["loss"] is not None]
    relayed = [row for row in here if row["path"] == "relayed"]
    if len(here) == trainers and len(telling) >= honest and relayed:
        return ""
    return f"the page shows {len(here)} of {trainers} peers, {len(telling)} with exchanges and {len(relayed)} relayed"


def page_opens(port: int, token: str) -> None:
    """Check that the page and its scripts open with the token only. Raises CheckError."""
    for path in ("/", "/page.js", "/uPlot.iife.min.js"):
        if (found := page(port, token, path=path)[0]) != 200:
            raise CheckError(f"{path} of the page: expected status 200, got {found}")
    for what, status, shown, host in (
        ("without a token", 401, "", "127.0.0.1"),
        ("with another token", 401, "another", "127.0.0.1"),
        ("with the host name of a website", 403, token, "evil.example"),
    ):
        if (found := page(port, shown, host)[0]) != status:
            raise CheckError(f"the page {what}: expected status {status}, got {found}")


def page(port: int, token: str, host: str = "127.0.0.1", path: str = "/status") -> tuple[int, str]:
    """Return the page's status and body; status 0 means no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": f"{host}:{port}", "Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def go_on(ids: Sequence[str]) -> None:
    """Wait until each of these peers has made MORE exchanges. Raises CheckError."""
    before = {each: exchanges(each) for each in ids}

    def missing() -> str:
        made = {each: exchanges(each) - before[each] for each in ids}
        slow = [f"{each[:12]} made {count}" for each, count in made.items() if count < MORE]
        return f"expected {MORE} more exchanges of each peer: {', '.join(slow)}" if slow else ""

    until(missing, EXCHANGES_S)


def exchanges(container: str) -> int:
    """Return the number of exchanges of a container's peer, from ``p2ptrain status``."""
    status = json.loads(docker("exec", container, "python3", "-m", "p2ptrain.cli", "status", HOME, "--json"))
    return int((status["training"] or {}).get("exchanges_ok", 0))


def has_saved(container: Mapping[str, Any]) -> None:
    """Check that a stopped peer has saved and exited cleanly. Raises CheckError."""
    _, _, after = docker("logs", str(container["Id"])).partition("[stop] ")
    if container["State"]["ExitCode"] or container["State"]["Running"]:
        raise CheckError(f"the stopped peer did not exit cleanly: {told(container)}")
    if not any(line.startswith("[save] saved /") for line in after.splitlines()):
        raise CheckError(f"the stopped peer does not report a save: {told(container)}")


def until(missing: Callable[[], str], most_s: float) -> None:
    """Wait until nothing is missing. Raises CheckError with what is missing after ``most_s`` seconds."""
    end = time.monotonic() + most_s
    while why := missing():
        if time.monotonic() >= end:
            raise CheckError(f"after {most_s:.0f} s: {why}")
        time.sleep(POLL_S)


def service(container: Mapping[str, Any]) -> str:
    return str(container["Config"]["Labels"]["com.docker.compose.service"])


def told(container: Mapping[str, Any]) -> str:
    state = container["State"]
    health = f", {state['Health']['Status']}" if "Health" in state else ""
    return f"{service(container)} {container['Id'][:12]} ({state['Status']}, status {state['ExitCode']}{health})"


def last_words(swarm: Swarm) -> None:
    for each in swarm.containers():
        say("\n".join([f"--- {told(each)}", *docker("logs", str(each["Id"])).splitlines()[-LINES:]]))


def docker(*arguments: str) -> str:
    return call(["docker", *arguments], COMMAND_S)


def call(command: Sequence[str], most_s: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises CheckError with the end of the output if it fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if command[:2] != ["docker", "exec"] else subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=most_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"not finished within {most_s:.0f} s: {shlex.join(command)}") from None
    if done.returncode:
        said = [*done.stdout.splitlines(), *(done.stderr or "").splitlines()]
        raise CheckError("\n".join([f"status {done.returncode}: {shlex.join(command)}", *said[-LINES:]]))
    return done.stdout


def engine_fault() -> str:
    """Return why no engine is usable and the remedy; empty if one answers."""
    if shutil.which("docker") is None:
        return "the command docker is not installed. Install Docker."
    try:
        call(["docker", "version"], COMMAND_S)
    except CheckError as fault:
        said = str(fault).splitlines()[-1]
        if "permission denied" in said.lower():
            return "this user may not use the engine. Type: sudo usermod -aG docker $USER; then log in again."
        return f"no engine answers: {said} Start it: sudo systemctl start docker."
    return ""


def compose_command() -> list[str]:
    """Return the command of Compose; empty if there is none."""
    with_plugin = ["docker", "compose"]
    if subprocess.run([*with_plugin, "version"], check=False, capture_output=True).returncode == 0:
        return with_plugin
    return ["docker-compose"] if shutil.which("docker-compose") else []


def environment_for(port: int, token: str) -> dict[str, str]:
    """Return our environment with variables that separate the project from others."""
    own = {"PAGE_PORT": str(port), "PAGE_TOKEN": token, "TOKENS": TOKENS, "PRESET": "demo"}
    networks = {"BACKBONE": "10.231.78", "HOME_NETWORK": "10.231.79"}
    return build_variables(os.environ.get(BUILD_VARIABLE, "")) | networks | dict(os.environ) | own


def build_variables(options: str) -> dict[str, str]:
    """Return the compose file's variables for options of ``docker build``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--network")
    parser.add_argument("--build-arg", action="append", default=[])
    known, _ = parser.parse_known_args(shlex.split(options))
    network = {"BUILD_NETWORK": known.network} if known.network else {}
    return network | dict(each.split("=", 1) for each in known.build_arg if "=" in each)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def noted(faults: list[str]) -> Iterator[None]:
    """Collect a CheckError of the block in ``faults`` instead of raising it."""
    try:
        yield
    except CheckError as fault:
        faults.append(str(fault))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    if fault := engine_fault():
        say(f"docker: the compose file was not run: {fault}")
        return 1
    if not (compose := compose_command()):
        say("docker: the compose file was not run: docker compose and docker-compose are missing. Install either.")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, port, token = time.monotonic(), free_port(), secrets.token_urlsafe(12)
    swarm, faults = Swarm(compose, environment_for(port, token)), list[str]()
    try:
        with noted(faults):
            swarm.down()  # leftovers of a check that was killed
            check(swarm, port, token)
        if faults:
            with noted(faults):
                last_words(swarm)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        say("removing all containers")
        with noted(faults):
            swarm.down()
    if faults:
        say("docker: the compose file FAILED: " + "\n".join(faults))
        return 1
    say(f"docker: the compose file passed in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
