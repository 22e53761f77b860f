"""``HOME/settings.toml``: per-machine options. They are never sent to others and never change the algorithm.

The fields of ``Settings`` determine the file in a new home, the checks and the error messages.
Unknown options are errors, because a misspelt cap would not hold.
"""

from __future__ import annotations

import errno
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.manifest import SETTINGS_FILE
from p2ptrain.manifest.document import field_lines, read_toml
from p2ptrain.manifest.faults import error_lines
from p2ptrain.manifest.section import Section
from p2ptrain.net.throttle import MBIT, MIN_RATE

MAX_BYTES = 64 << 10
GB = 1e9
MIN_MBIT = MIN_RATE / MBIT
HIGHEST = 1_000_000
"""Largest number: more than any line or month; a larger one is a typing error."""
MAX_THREADS = 1024
MAX_PROGRAMS, MAX_PROGRAM_CHARS = 32, 64
MIN_MEMORY_GB = 0.25

WAITING = frozenset({"threads", "memory_gb", "compile", "punch"})
"""Names of the options whose edits apply only from the next start."""

CompileMode = Literal["auto", "on", "off"]
COMPILE_VARIABLE = "P2PTRAIN_COMPILE"
"""Environment variable that takes precedence over the option ``compile``."""

_SPAN = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)")


def _cap(value: float) -> float:
    if 0 < value < MIN_MBIT:
        raise ValueError(f"a cap is 0 (no cap) or at least {MIN_MBIT:g}")
    return value


def _program(name: str) -> str:
    if not (0 < len(name) <= MAX_PROGRAM_CHARS and name.isprintable() and "/" not in name and name == name.strip()):
        raise ValueError(f"a program is named by 1 to {MAX_PROGRAM_CHARS} printable characters, without its folder")
    return name


def _memory(value: float) -> float:
    if 0 < value < MIN_MEMORY_GB:
        raise ValueError(f"it is 0 or at least {MIN_MEMORY_GB:g} GB")
    return value


def _hours(text: str) -> str:
    if text and not (_SPAN.fullmatch(text) and len(set(_span(text))) == 2):
        raise ValueError('hours are "" (always) or two different times of the day like "22:00-07:30"')
    return text


def _span(text: str) -> tuple[int, int]:
    """Return begin and end in minutes of the day; ``text`` must match ``_SPAN``."""
    found = _SPAN.fullmatch(text)
    assert found is not None, "only called with a span"
    numbers = [int(each) for each in found.groups()]
    return 60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]


Cap = Annotated[float, Field(ge=0, le=HIGHEST), AfterValidator(_cap)]
"""Rate in Mbit/s; 0: no cap."""


class Settings(Section):
    """Contents of settings.toml; by default nothing is capped."""

    upload_mbit: Cap = 0.0
    """Maximum upload rate in Mbit/s (10^6 bits per second). Allowed: 0 (no cap), or a number from 0.25 to 1,000,000."""

    download_mbit: Cap = 0.0
    """Maximum download rate in Mbit/s. Allowed: 0 (no cap), or a number from 0.25 to 1,000,000."""

    monthly_gb: float = Field(default=0.0, ge=0, le=HIGHEST)
    """Maximum traffic in a calendar month, sent and received together, in GB (10^9 bytes). When it is used up, the peer
    is paused until the month is over or this number is raised. Allowed: 0 (no limit), or a number up to 1,000,000.
    """

    hours: Annotated[str, AfterValidator(_hours)] = ""
    """Hours of training, by this machine's clock. At other times the peer is paused, as by `p2ptrain pause`. Allowed:
    "" (always), or two different times of the day like "22:00-07:30"."""

    pause_while: list[Annotated[str, AfterValidator(_program)]] = Field(default=[], max_length=MAX_PROGRAMS)
    """Programs during which the peer is paused, by the names that `ps -e` shows; it resumes a minute after the last
    one ended. Allowed: a list of at most 32 names like ["steam", "blender"]."""

    pause_on_battery: bool = False
    """Whether the peer is paused while the battery feeds this computer. Allowed: true or false."""

    threads: int = Field(default=0, ge=0, le=MAX_THREADS)
    """Number of CPU threads that torch uses; 0: torch decides. Applies from the next start. Allowed: a whole number
    from 0 to 1,024."""

    memory_gb: Annotated[float, Field(ge=0, le=HIGHEST), AfterValidator(_memory)] = 0.0
    """Memory in GB (10^9 bytes) that the peer plans with, the card's not included; it does not start with a model that
    needs more. Applies from the next start. Allowed: 0 (all), or a number from 0.25 to 1,000,000."""

    compile: CompileMode = "auto"
    """Whether a C++ compiler makes training faster, in the background, on a CUDA card with Triton; "auto": at low
    priority if at least 10 minutes of training remain; "on": at once. Applies from the next start; the environment
    variable P2PTRAIN_COMPILE takes precedence. Allowed: "auto", "on" or "off"."""

    punch: bool = True
    """Whether this peer, if nobody can dial it, connects directly to others through its router and theirs. A direct
    partner learns this computer's public IP address; through a relay it does not. Applies from the next start. Allowed:
    true or false."""

    @property
    def upload_rate(self) -> float:
        """Upload cap in bytes per second; infinity: no cap."""
        return self.upload_mbit * MBIT or math.inf

    @property
    def download_rate(self) -> float:
        return self.download_mbit * MBIT or math.inf

    @property
    def monthly_bytes(self) -> float:
        return self.monthly_gb * GB or math.inf

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * GB or math.inf

    def is_hour(self, minute: int) -> bool:
        """Return whether ``hours`` allow training at this minute of the day, 0 to 1439."""
        if not self.hours:
            return True
        begin, end = _span(self.hours)
        return begin <= minute < end if begin < end else minute >= begin or minute < end


_HEADER = """\
# What this peer may use of your machine. Nothing here is sent to others or changes how the swarm trains. You can edit
# the file while the peer runs; a change applies within seconds. If the file is faulty, the peer says so and keeps the
# previous settings.
"""


def template() -> str:
    """Return the file of a new home: every option at its default, with its meaning and the allowed values."""
    lines = [_HEADER]
    for name, field in Settings.model_fields.items():
        lines += [*field_lines(field, name, field.default), ""]
    return "\n".join(lines[:-1]) + "\n"


def parse(text: str) -> Settings:
    """Parse settings. Raises ValueError with one line that names the faulty options and the allowed values."""
    try:
        data = read_toml(text)
    except ValueError as error:
        raise ValueError(f"it is not valid TOML: {error}") from None
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        raise ValueError("; ".join(error_lines(error, Settings))) from None


def compile_mode(setting: CompileMode, environment: Mapping[str, str]) -> CompileMode:
    """Return the mode of the environment variable, or else of the settings. Raises HomeError."""
    match environment.get(COMPILE_VARIABLE, ""):
        case "":
            return setting
        case "auto" | "on" | "off" as mode:
            return mode
        case wrong:
            raise HomeError(
                f"The environment variable {COMPILE_VARIABLE} is {wrong!r}.", "Use auto, on or off, or unset it."
            )


class SettingsFile:
    """The settings file of one home: call ``load`` at the start, then ``changed`` periodically from one thread."""

    def __init__(self, home: Path) -> None:
        self.path = home / SETTINGS_FILE
        self._applied: bytes | None = None
        """Content of the last file that was parsed; None if there was none, or it could not be read."""
        self._seen: bytes | None = None

    def load(self, create: bool = True) -> Settings:
        """Read the file; if there is none, write the template first, or without ``create`` return the defaults.

        Raises HomeError if it is faulty.
        """
        try:
            if not files.exists(self.path):
                if not create:
                    return Settings()
                files.write_new(self.path, template().encode())
            self._applied = self._seen = self._read()
            return _parsed(self._applied)
        except OSError as error:
            is_none = error.errno == errno.EINVAL  # not a regular file
            remedy = "Move it away; the next start writes a new one." if is_none else files.remedy(error, "")
            raise HomeError(f"{self.path} cannot be used: {error.strerror}.", remedy) from error
        except ValueError as error:
            remedy = "Fix it, or delete the file; the next start writes a new one."
            raise HomeError(f"{self.path} is faulty: {error}.", remedy) from None

    def changed(self) -> Settings | str | None:
        """Return the new settings after an edit, the reason if they are faulty, or None if nothing changed.

        A removed file means the defaults. An edit counts only when the file is the same twice in a row, because
        some editors first empty it or move it away. An unreadable file is retried at each call, which returns why.
        """
        try:
            content = self._read()
        except OSError as error:
            self._applied = None
            return error.strerror or str(error)
        is_same, self._seen = content == self._seen, content
        if not is_same or content == self._applied:
            return None
        self._applied = content
        try:
            return _parsed(content)
        except ValueError as error:
            return str(error)

    def _read(self) -> bytes:
        """Return the content of the file, or the start of a huge one; empty without a file. Raises OSError."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # reading from a pipe may never end
                raise OSError(errno.EINVAL, "it is not a file")
            with self.path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return b""


def _parsed(content: bytes) -> Settings:
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return parse(content.decode("utf-8-sig", errors="replace"))
