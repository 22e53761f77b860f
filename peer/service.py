"""``p2ptrain service``: the peer in a home as a service of its owner, started at each login and after a crash.

==========  ==========================================  ================================
system      file                                        controlled by
==========  ==========================================  ================================
systemd     ~/.config/systemd/user/<name>.service       ``systemctl --user``
launchd     ~/Library/LaunchAgents/<name>.plist         ``launchctl``
==========  ==========================================  ================================

The service runs ``p2ptrain peer --home HOME``, which the home's remembered options complete.
"""

from __future__ import annotations

import hashlib
import os
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import click

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.base.text import command_line, one_line, printable
from peer.home import Home, check_no_other
from peer.options import HOME

STOP_S = 330
"""Seconds in which the service may save and leave: 300 s for a checkpoint of 2.7 GB (llama-135m) on a memory card that
writes 10 MB/s, and 30 s."""
RESTART_S, NICE = 30, 5
"""Seconds before a restart after a failure, and priority below the owner's programs (nice(2)).
Guess: how often peers crash, and the slowdown that owners notice."""
COMMAND_S = STOP_S + 30
"""Timeout of a command of the service manager, which may wait for the peer's end."""
CARRIED = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TMPDIR", "P2PTRAIN_COMPILE", "CXX"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK"),
)
"""Environment variables that the service keeps; none holds a secret, because others may read the file."""
UNIT = Template(f"""\
[Unit]
Description=p2ptrain peer $name
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
ExecStart=$command
Environment=$environment
Restart=on-failure
RestartSec={RESTART_S}
# Only the peer gets the signal; it saves, says goodbye and ends its network daemon.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={STOP_S}
Nice={NICE}

[Install]
WantedBy=default.target
""")

Words = Sequence[str]


@dataclass(frozen=True, slots=True)
class HomeService:
    """The service of a home: its file, and the commands of the system's service manager."""

    path: Path
    content: bytes
    start: Sequence[Words]
    """The first one clears what an earlier start left, and fails if there is nothing."""
    stop: Words
    messages: str
    """Where the peer's messages are."""

    def run(self, words: Words, is_checked: bool = True) -> None:
        """Run a command of the service manager. Raises UserError if it hangs, or if it fails and ``is_checked``."""
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=COMMAND_S
            )
        except subprocess.TimeoutExpired:
            why = f"no answer within {COMMAND_S} s"
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if done.returncode == 0 or not is_checked:
                return
            why = one_line(" ".join(done.stderr.split())).rstrip(".") or f"exit status {done.returncode}"
        raise UserError(
            f"`{command_line(*words)}` failed: {why}.",
            "Log in as this user directly, not by su or sudo, and repeat the command.",
        )


def systemd(home: Path, command: Words, environment: Mapping[str, str], user_home: Path) -> HomeService:
    """Return a home's service of systemd.

    Args:
        home: absolute path of the peer's home.
        command: the service's command; its first word is an absolute path.
        environment: variables that the service keeps.
        user_home: the owner's home directory.
    """
    program, *arguments = command
    content = UNIT.substitute(
        name=service_name(home),
        command=" ".join([unit_word(program), *(unit_word(each).replace("$", "$$") for each in arguments)]),
        environment=" ".join(unit_word(f"{name}={value}") for name, value in environment.items()),
    )
    unit, manager = f"{service_name(home)}.service", ("systemctl", "--user")
    return HomeService(
        user_home / ".config/systemd/user" / unit,
        content.encode(),
        [
            (*manager, "reset-failed", unit),
            (*manager, "daemon-reload"),
            (*manager, "enable", unit),
            (*manager, "restart", unit),
        ],
        stop=(*manager, "disable", "--now", unit),
        messages=f"{command_line('journalctl', '--user', '-fu', unit)}\n"
        "It runs while you are logged in. To run it always, from boot on: loginctl enable-linger",
    )


def launchd(home: Path, command: Words, environment: Mapping[str, str], user_home: Path) -> HomeService:
    """Return a home's service of launchd. Arguments as for ``systemd``."""
    label, domain = f"org.{service_name(home).replace('-', '.', 1)}", f"gui/{os.getuid()}"
    path, errors = user_home / f"Library/LaunchAgents/{label}.plist", home / "service.log"
    content = {
        "Label": label,
        "ProgramArguments": list(command),
        "EnvironmentVariables": dict(environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},  # restart after a failure only
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": STOP_S,
        "Nice": NICE,
        "ProcessType": "Background",
        "StandardOutPath": "/dev/null",  # it would grow without a limit, and events.jsonl has all of it
        "StandardErrorPath": str(errors),
    }
    stop = ("launchctl", "bootout", f"{domain}/{label}")
    return HomeService(
        path,
        plistlib.dumps(content),
        [stop, ("launchctl", "bootstrap", domain, str(path))],
        stop,
        messages=f"{home / 'events.jsonl'}; errors: {errors}",
    )


def service_name(home: Path) -> str:
    """Return the name of a home's service: unique to its path, in letters that every service manager takes."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", home.name).strip("-")[:32] or "home"
    return f"p2ptrain-{readable}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}"


def unit_word(text: str) -> str:
    """Quote a word for a unit file (systemd.syntax(7)): escapes, and no specifiers."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def service_of(home: Path) -> HomeService:
    """Return a home's service by this system's manager. Raises UserError if there is none."""
    here = home.absolute()
    # Without -P, a directory in the service's working directory could stand in for a package of ours.
    command = [sys.executable, "-P", "-m", "p2ptrain.cli", "peer", "--home", str(here)]
    environment = {"PYTHONUNBUFFERED": "1"} | {name: os.environ[name] for name in CARRIED if name in os.environ}
    for text in *command, *environment.values():
        if not text.isprintable():  # neither are bytes that are not UTF-8 (PEP 383)
            raise UserError(
                f"{printable(text)} has characters that service managers refuse.",
                "Give the directory another name, or start the peer without a service.",
            )
    if sys.platform == "darwin":
        return launchd(here, command, environment, files.user_home())
    if shutil.which("systemctl") is not None:
        return systemd(here, command, environment, files.user_home())
    line = f"@reboot {command_line(*command)}".replace("%", "\\%")  # crontab(5)
    raise UserError(
        "This system has neither systemd nor launchd, which would start the peer.",
        f"Let cron start it: run crontab -e and add this line: {line}",
    )


@click.group(short_help="Start a peer at each login and after a crash.")
def service() -> None:
    """Run the peer in a home as a service of yours, with the options that the home remembers."""


@service.command(short_help="Install and start the service.")
@HOME
def install(home: Path) -> None:
    """Run the peer in HOME as a service, from now on: at each login, and again after a crash."""
    found = service_of(home)
    check_no_other(home)
    if Home(home).load_manifest(None) is None:
        raise HomeError(f"There is no peer in {home} yet.", "Join by hand first: p2ptrain peer LINK")
    if Home(home).is_inhabited():
        stop = ["service", "uninstall"] if found.path.exists() else ["finish"]
        raise HomeError(f"A peer runs in {home} already.", f"Stop it first: {command_line('p2ptrain', *stop, home)}")
    try:
        is_new = not files.exists(found.path)
        found.path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(found.path, found.content)
    except OSError as error:
        raise UserError(f"{found.path} cannot be written: {error.strerror}.", files.remedy(error, "")) from error
    try:
        for number, words in enumerate(found.start):
            found.run(words, is_checked=number > 0)
    except UserError:
        if is_new:  # else the next login might start what the owner was told had failed
            found.path.unlink(missing_ok=True)
        raise
    click.echo(f"The peer in {home} runs as a service: {found.path}\nIts messages: {found.messages}")
    click.echo(f"Its state: {command_line('p2ptrain', 'status', home)}")
    click.echo(f"To stop and remove it: {command_line('p2ptrain', 'service', 'uninstall', home)}")


@service.command(short_help="Stop and remove the service.")
@HOME
def uninstall(home: Path) -> None:
    """Stop the service of HOME, after its peer has saved, and remove it. The home stays."""
    found = service_of(home)
    if not found.path.exists():
        remedy = f"Install it: {command_line('p2ptrain', 'service', 'install', home)}"
        raise UserError(f"There is no service for {home}.", remedy)
    found.run(found.stop)
    try:
        found.path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{found.path} cannot be removed: {error.strerror}.", files.remedy(error, "")) from error
    click.echo(f"Removed {found.path}. By hand: {command_line('p2ptrain', 'peer', '--home', home.absolute())}")
