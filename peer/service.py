"""``p2ptrain service``: the peer in a home as a service of its owner, started at each login and after a crash.

==========  ==========================================  ================================
system      file                                        controlled by
==========  ==========================================  ================================
systemd     ~/.config/systemd/user/<name>.service       ``systemctl --user``
launchd     ~/Library/LaunchAgents/<label>.plist        ``launchctl``
==========  ==========================================  ================================

The service runs ``p2ptrain peer --home HOME``, which the home's remembered options complete.
"""

from __future__ import annotations

import getpass
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

import click

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.base.text import command_line, one_line, printable
from peer.home import Home, check_no_other
from peer.options import HOME

STOP_S = 330
"""Seconds in which the service may save and leave: 300 s for a checkpoint of 2.7 GB (llama-135m) on a memory card that
writes 10 MB/s, and 30 s."""
RESTART_S, BURST, BURST_S = 30, 5, 600
"""Seconds before a restart after a failure; most starts in ``BURST_S`` seconds, then systemd gives up.
Guess: how often peers crash, and how long boots take."""
NICE = 5
"""Priority below that of the owner's programs (nice(2)). Guess: the slowdown that owners notice."""
COMMAND_S = 30.0
"""Timeout of a command of the service manager that does not stop the peer."""
CARRIED = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TMPDIR",
    "P2PTRAIN_COMPILE",
    "CXX",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
    "ZE_AFFINITY_MASK",
)
"""Environment variables that the service keeps; none holds a secret, because others may read the file."""
UNUSABLE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
"""Characters that files of service managers cannot hold; surrogates stand for bytes that are not UTF-8 (PEP 383)."""
LINGER = Path("/var/lib/systemd/linger")
"""Directory with one file for each user whose services run without a login (logind)."""


@dataclass(frozen=True, slots=True)
class Systemd:
    """systemd's manager of the owner's services.

    Args:
        home: absolute path of the peer's home.
        command: the service's command; its first word is an absolute path.
        environment: variables that the service keeps.
        user_home: the owner's home directory.
    """

    home: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    user_home: Path

    @property
    def unit(self) -> str:
        return f"{service_name(self.home)}.service"

    @property
    def path(self) -> Path:
        return self.user_home / ".config/systemd/user" / self.unit

    def text(self) -> bytes:
        program, *arguments = self.command
        words = [unit_word(program), *(unit_word(each).replace("$", "$$") for each in arguments)]
        variables = {"PYTHONUNBUFFERED": "1", **self.environment}
        environment = " ".join(unit_word(f"{name}={value}") for name, value in variables.items())
        return f"""\
[Unit]
Description=p2ptrain peer {service_name(self.home)}
StartLimitIntervalSec={BURST_S}
StartLimitBurst={BURST}

[Service]
Type=exec
ExecStart={" ".join(words)}
Environment={environment}
Restart=on-failure
RestartSec={RESTART_S}
# Only the peer gets the signal; it saves, says goodbye and ends its network daemon.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={STOP_S}
Nice={NICE}

[Install]
WantedBy=default.target
""".encode()

    def start(self) -> list[str]:
        """Load the file, start the service, and return lines for the owner. Raises UserError."""
        self._run("daemon-reload")
        self._run("reset-failed", self.unit, is_checked=False)
        self._run("enable", self.unit)
        self._run("restart", self.unit, timeout_s=STOP_S + COMMAND_S)
        lines = [f"Its messages: {command_line('journalctl', '--user', '-fu', self.unit)}"]
        try:
            lingers = (LINGER / getpass.getuser()).exists()
        except (KeyError, OSError):  # a user without an entry in the system's list
            lingers = False
        if not lingers:
            lines.append("It runs while you are logged in. To run it always, from boot on: loginctl enable-linger")
        return lines

    def stop(self) -> None:
        self._run("disable", "--now", self.unit, timeout_s=STOP_S + COMMAND_S)

    def forget(self) -> None:
        self._run("daemon-reload")

    def is_running(self) -> bool:
        """Return whether the service runs now; False if the manager does not answer."""
        return self._run("is-active", "--quiet", self.unit, is_checked=False).returncode == 0

    def state(self) -> list[str]:
        fields = ("UnitFileState", "ActiveState", "SubState", "Result", "NRestarts")
        shown = self._run("show", self.unit, f"--property={','.join(fields)}").stdout
        found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        enabled, active, sub, result, restarts = (found.get(name, "unknown") for name in fields)
        why = "" if result in ("success", "unknown") else f", ended by {result}"
        return [
            f"{self.unit}: {enabled}, {active} ({sub}){why}, restarts: {restarts}",
            f"Its messages: {command_line('journalctl', '--user', '-u', self.unit)}",
        ]

    def _run(
        self, *words: str, is_checked: bool = True, timeout_s: float = COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        remedy = (
            "Log in as this user directly, not by su or sudo, and repeat the command. Where systemd does not run, add "
            f"this line with crontab -e: {crontab_line(self.command)}"
        )
        return manage(["systemctl", "--user", *words], is_checked, timeout_s, remedy)


@dataclass(frozen=True, slots=True)
class Launchd:
    """macOS's manager of the owner's services. Arguments as for ``Systemd``."""

    home: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    user_home: Path

    @property
    def label(self) -> str:
        return f"org.{service_name(self.home).replace('-', '.', 1)}"

    @property
    def path(self) -> Path:
        return self.user_home / "Library/LaunchAgents" / f"{self.label}.plist"

    def text(self) -> bytes:
        return plistlib.dumps(
            {
                "Label": self.label,
                "ProgramArguments": list(self.command),
                "EnvironmentVariables": {"PYTHONUNBUFFERED": "1", **self.environment},
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},  # restart after a failure only
                "ThrottleInterval": RESTART_S,
                "ExitTimeOut": STOP_S,
                "Nice": NICE,
                "ProcessType": "Background",
                "StandardOutPath": "/dev/null",  # it would grow without a limit, and events.jsonl has all of it
                "StandardErrorPath": str(self.home / "service.log"),
            }
        )

    def start(self) -> list[str]:
        self._run("bootout", f"{self._domain}/{self.label}", is_checked=False, timeout_s=STOP_S + COMMAND_S)
        self._run("bootstrap", self._domain, str(self.path))
        return [f"Its messages: {self.home / 'events.jsonl'}; errors: {self.home / 'service.log'}"]

    def stop(self) -> None:
        self._run("bootout", f"{self._domain}/{self.label}", is_checked=False, timeout_s=STOP_S + COMMAND_S)

    def forget(self) -> None:
        """Nothing is left after ``stop``."""

    def is_running(self) -> bool:
        done = self._run("print", f"{self._domain}/{self.label}", is_checked=False)
        return done.returncode == 0 and "state = running" in done.stdout

    def state(self) -> list[str]:
        return [f"{self.label}: {'running' if self.is_running() else 'not running'}"]

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    def _run(
        self, *words: str, is_checked: bool = True, timeout_s: float = COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        remedy = "Log in to this Mac's desktop as this user, and repeat the command."
        return manage(["launchctl", *words], is_checked, timeout_s, remedy)


ServiceManager = Systemd | Launchd


def service_name(home: Path) -> str:
    """Return the name of a home's service: unique to its path, in letters that every service manager takes."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", home.name).strip("-")[:32] or "home"
    return f"p2ptrain-{readable}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}"


def unit_word(text: str) -> str:
    """Quote a word for a unit file (systemd.syntax(7)): escapes, and no specifiers."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
    return f'"{escaped}"'


def crontab_line(command: Sequence[str]) -> str:
    """Return a line for crontab(5) that runs a command at boot."""
    return f"@reboot {command_line(*command)}".replace("%", "\\%")


def manage(words: Sequence[str], is_checked: bool, timeout_s: float, remedy: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the service manager. Raises UserError if it hangs, or if it fails and ``is_checked``."""
    shown = command_line(*words)
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"`{shown}` did not answer within {timeout_s:.0f} s.", "Repeat the command.") from None
    except OSError as error:
        raise UserError(f"`{shown}` cannot be run: {error.strerror}.", remedy) from error
    if is_checked and done.returncode:
        why = one_line(" ".join(done.stderr.split())) or f"exit status {done.returncode}"
        raise UserError(f"`{shown}` failed: {why.rstrip('.')}.", remedy)
    return done


def manager_of(home: Path) -> ServiceManager:
    """Return this system's service manager for a home. Raises UserError if there is none."""
    here = home.absolute()
    # Without -P, a directory in the service's working directory could stand in for a package of ours.
    command = [sys.executable, "-P", "-m", "p2ptrain.cli", "peer", "--home", str(here)]
    environment = {name: os.environ[name] for name in CARRIED if name in os.environ}
    for text in *command, *environment.values():
        if UNUSABLE.search(text):
            raise UserError(
                f"{printable(text)} has control characters or is not UTF-8, which service managers refuse.",
                "Give the directory another name, or start the peer without a service.",
            )
    if sys.platform == "darwin":
        return Launchd(here, command, environment, files.user_home())
    if shutil.which("systemctl") is not None:
        return Systemd(here, command, environment, files.user_home())
    raise UserError(
        "This system has neither systemd nor launchd, which would start the peer.",
        f"Let cron start it: run crontab -e and add this line: {crontab_line(command)}",
    )


@click.group(short_help="Start a peer at each login and after a crash.")
def service() -> None:
    """Run the peer in a home as a service of yours, with the options that the home remembers."""


@service.command(short_help="Install and start the service.")
@HOME
def install(home: Path) -> None:
    """Run the peer in HOME as a service, from now on: at each login, and again after a crash."""
    manager = manager_of(home)
    _check_peer(home)
    if Home(home).is_inhabited() and not manager.is_running():
        raise HomeError(f"A peer runs in {home} already.", f"Stop it first: {command_line('p2ptrain', 'finish', home)}")
    try:
        is_new = not files.exists(manager.path)
        manager.path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(manager.path, manager.text())
    except OSError as error:
        raise UserError(f"{manager.path} cannot be written: {error.strerror}.", files.remedy(error, "")) from error
    try:
        lines = manager.start()
    except UserError:
        if is_new:  # else the next login might start what the owner was told had failed
            manager.path.unlink(missing_ok=True)
        raise
    click.echo(f"The peer in {home} runs as a service: {manager.path}")
    for line in lines:
        click.echo(line)
    click.echo(f"To stop and remove it: {command_line('p2ptrain', 'service', 'uninstall', home)}")


@service.command(short_help="Show the service's state.")
@HOME
def status(home: Path) -> None:
    """Show whether the service of HOME is installed and runs."""
    manager = _installed(home)
    for line in manager.state():
        click.echo(line)
    click.echo(f"The peer itself: {command_line('p2ptrain', 'status', home)}")


@service.command(short_help="Stop and remove the service.")
@HOME
def uninstall(home: Path) -> None:
    """Stop the service of HOME, after its peer has saved, and remove it. The home stays."""
    manager = _installed(home)
    manager.stop()
    try:
        manager.path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{manager.path} cannot be removed: {error.strerror}.", files.remedy(error, "")) from error
    manager.forget()
    click.echo(f"Removed {manager.path}. By hand: {command_line('p2ptrain', 'peer', '--home', home.absolute())}")


def _installed(home: Path) -> ServiceManager:
    manager = manager_of(home)
    if not manager.path.exists():
        raise UserError(
            f"There is no service for {home}.", f"Install it: {command_line('p2ptrain', 'service', 'install', home)}"
        )
    return manager


def _check_peer(home: Path) -> None:
    check_no_other(home)
    if Home(home).load_manifest(None) is None:
        raise HomeError(
            f"There is no peer in {home} yet.",
            "Join by hand first: p2ptrain peer LINK",
        )
