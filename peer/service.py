"""``p2ptrain service``: the peer in a home as a service of its owner: systemd starts it at login and after a crash.

The unit, ~/.config/systemd/user/NAME.service, runs ``p2ptrain peer --home HOME``, which the home's remembered options
complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path
from string import Template

import click

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.base.system_tool import ToolError, output_of
from p2ptrain.base.text import command_line, printable
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


def service_name(home: Path) -> str:
    """Return the name of a home's service: unique to its path, in letters that systemd takes."""
    home = home.absolute()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", home.name).strip("-")[:32] or "home"
    return f"p2ptrain-{readable}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}"


def unit_word(text: str) -> str:
    """Quote a word for a unit file (systemd.syntax(7)): escapes, and no specifiers."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def command_of(home: Path) -> list[str]:
    """Return the command of a home's service, whose first word is an absolute path."""
    # Without -P, a directory in the service's working directory could stand in for a package of ours.
    return [sys.executable, "-P", "-m", "p2ptrain.cli", "peer", "--home", str(home.absolute())]


def environment() -> dict[str, str]:
    """Return the variables that the service keeps."""
    return {"PYTHONUNBUFFERED": "1"} | {name: os.environ[name] for name in CARRIED if name in os.environ}


def unit_of(home: Path) -> bytes:
    """Return the content of a home's unit. Raises UserError if systemd would not take a path or a variable."""
    command, variables = command_of(home), environment()
    for text in *command, *variables.values():
        if not text.isprintable():  # neither are bytes that are not UTF-8 (PEP 383)
            raise UserError(
                f"{printable(text)} has characters that systemd refuses.",
                "Give the directory another name, or start the peer without a service.",
            )
    program, *arguments = command
    return UNIT.substitute(
        name=service_name(home),
        command=" ".join([unit_word(program), *(unit_word(each).replace("$", "$$") for each in arguments)]),
        environment=" ".join(unit_word(f"{name}={value}") for name, value in variables.items()),
    ).encode()


def unit_path(home: Path) -> Path:
    """Return the path of a home's unit. Raises UserError if this system has no systemd."""
    if shutil.which("systemctl") is not None:
        return files.user_home() / ".config/systemd/user" / f"{service_name(home)}.service"
    line = f"@reboot {command_line(*command_of(home))}".replace("%", "\\%")  # crontab(5)
    raise UserError(
        "This system has no systemd, which would start the peer.",
        f"Let cron start it: run crontab -e and add this line: {line}",
    )


def systemctl(*words: str) -> None:
    """Run a command of the owner's service manager. Raises UserError."""
    try:
        output_of("systemctl", "--user", *words, deadline_s=COMMAND_S)
    except ToolError as error:
        problem = f"`{command_line('systemctl', '--user', *words)}` failed: {str(error).rstrip('.')}."
        remedy = "Log in as this user directly, not by su or sudo, and repeat the command."
        raise UserError(problem, remedy) from None


@click.group(short_help="Start a peer at each login and after a crash.")
def service() -> None:
    """Run the peer in a home as a service of yours (systemd), with the options that the home remembers."""


@service.command(short_help="Install and start the service.")
@HOME
def install(home: Path) -> None:
    """Run the peer in HOME as a service, from now on: at each login, and again after a crash."""
    path, content = unit_path(home), unit_of(home)
    check_no_other(home)
    if Home(home).load_manifest(None) is None:
        raise HomeError(f"There is no peer in {home} yet.", "Join by hand first: p2ptrain peer LINK")
    if Home(home).is_inhabited():
        stop = ["service", "uninstall"] if path.exists() else ["finish"]
        raise HomeError(f"A peer runs in {home} already.", f"Stop it first: {command_line('p2ptrain', *stop, home)}")
    try:
        is_new = not files.exists(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.", files.remedy(error, "")) from error
    try:
        with contextlib.suppress(UserError):  # there is nothing to reset
            systemctl("reset-failed", path.name)
        systemctl("daemon-reload")
        systemctl("enable", path.name)
        systemctl("restart", path.name)
    except UserError:
        if is_new:  # else the next login might start what the owner was told had failed
            path.unlink(missing_ok=True)
        raise
    click.echo(f"The peer in {home} runs as a service: {path}")
    click.echo(f"Its messages: {command_line('journalctl', '--user', '-fu', path.name)}")
    click.echo("It runs while you are logged in. To run it always, from boot on: loginctl enable-linger")
    click.echo(f"Its state: {command_line('p2ptrain', 'status', home)}")
    click.echo(f"To stop and remove it: {command_line('p2ptrain', 'service', 'uninstall', home)}")


@service.command(short_help="Stop and remove the service.")
@HOME
def uninstall(home: Path) -> None:
    """Stop the service of HOME, after its peer has saved, and remove it. The home stays."""
    path = unit_path(home)
    if not path.exists():
        remedy = f"Install it: {command_line('p2ptrain', 'service', 'install', home)}"
        raise UserError(f"There is no service for {home}.", remedy)
    systemctl("disable", "--now", path.name)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be removed: {error.strerror}.", files.remedy(error, "")) from error
    click.echo(f"Removed {path}. By hand: {command_line('p2ptrain', 'peer', '--home', home.absolute())}")
