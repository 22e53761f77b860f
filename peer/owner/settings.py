"""``HOME/settings.toml``: per-machine options. They are never sent to others and never change the algorithm.

Each option is one row of ``OPTIONS``, from which the file in a new home, the checks and the error messages are made.
Unknown options are errors, because a misspelt cap would not hold.
"""

from __future__ import annotations

import difflib
import errno
import math
import re
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.manifest import SETTINGS_FILE
from p2ptrain.net.throttle import LOWEST_RATE
from p2ptrain.wire import MAX_NICKNAME_CHARS, is_nickname

MAX_BYTES = 64 << 10
"""Maximum size of the file."""
MBIT = 125_000.0
"""Bytes per megabit."""
GB = 1e9
"""Bytes per GB."""
LOWEST_MBIT = LOWEST_RATE / MBIT
"""Smallest cap in Mbit/s."""
HIGHEST = 1e6
"""Largest number: more than any line or month; a larger one is a typing error."""
MAX_THREADS = 1024

Mark = tuple[int, int, int] | None
"""Modification time in ns, size and inode of the file; None without a file."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The owner's settings; the defaults allow everything."""

    upload_mbit: float = 0.0
    download_mbit: float = 0.0
    monthly_gb: float = 0.0
    hours: str = ""
    nickname: str = ""
    device: str = "auto"
    threads: int = 0
    share_figures: bool = False

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

    def is_hour(self, minute: int) -> bool:
        """Return whether ``hours`` allow training at this minute of the day, 0 to 1439."""
        if not self.hours:
            return True
        begin, end = _span(self.hours)
        return begin <= minute < end if begin < end else minute >= begin or minute < end


@dataclass(frozen=True, slots=True)
class Option:
    """One option, with its explanation and check."""

    name: str
    meaning: str
    allowed: str
    fits: Callable[[Any], bool]
    waits: bool = False
    """Whether an edit applies only from the next start; else at once."""


def _number(value: Any) -> bool:
    """Return whether ``value`` is a number from 0 to HIGHEST; comparison also rejects NaN and huge integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= HIGHEST


def _cap(value: Any) -> bool:
    return _number(value) and (value == 0 or value >= LOWEST_MBIT)


def _is_span(value: Any) -> bool:
    if not isinstance(value, str) or not (value == "" or _SPAN.fullmatch(value)):
        return False
    return value == "" or len(set(_span(value))) == 2


def _is_nickname(value: Any) -> bool:
    return isinstance(value, str) and is_nickname(value)


_SPAN = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)")


def _span(text: str) -> tuple[int, int]:
    """Return begin and end in minutes of the day; ``text`` must match ``_SPAN``."""
    found = _SPAN.fullmatch(text)
    assert found is not None, "asked of spans alone"
    numbers = [int(each) for each in found.groups()]
    return 60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]


OPTIONS = (
    Option(
        "upload_mbit",
        "Maximum upload rate in Mbit/s (10^6 bits per second). 0: no cap.",
        f"0 (no cap), or a number from {LOWEST_MBIT:g} to {HIGHEST:,.0f}",
        _cap,
    ),
    Option(
        "download_mbit",
        "Maximum download rate in Mbit/s. 0: no cap.",
        f"0 (no cap), or a number from {LOWEST_MBIT:g} to {HIGHEST:,.0f}",
        _cap,
    ),
    Option(
        "monthly_gb",
        "Maximum traffic in a calendar month, sent and received together, in GB (10^9 bytes). When it is used up, the\n"
        "peer trains alone until the month is over or this number is raised. 0: no limit.",
        f"0 (no limit), or a number up to {HIGHEST:,.0f}",
        _number,
    ),
    Option(
        "hours",
        'Hours of training, by this machine\'s clock: "22:00-07:30". At other times the peer is paused, as by\n'
        "`p2ptrain pause`. Empty: always.",
        '"" (always), or two different times of the day like "22:00-07:30"',
        _is_span,
    ),
    Option(
        "nickname",
        "Name shown to people. Applies from the next start; --nickname takes precedence.",
        f"at most {MAX_NICKNAME_CHARS} printable characters",
        _is_nickname,
        waits=True,
    ),
    Option(
        "device",
        "Device for training. Applies from the next start; --device takes precedence.",
        '"auto", "cpu", "cuda" or "cuda:<number>"',
        lambda value: isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value) is not None,
        waits=True,
    ),
    Option(
        "threads",
        "Number of CPU threads that torch uses. Applies from the next start. 0: torch decides.",
        f"a whole number from 0 to {MAX_THREADS:,}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_THREADS,
        waits=True,
    ),
    Option(
        "share_figures",
        "Whether a bootstrap that shows the swarm on a page may ask this peer for its figures: device, speed, losses,\n"
        "traffic, exchanges and failures with partners, a sample text of its model. Nickname and progress are public\n"
        "in any case. --share takes precedence.",
        "true or false",
        lambda value: isinstance(value, bool),
    ),
)


WAITING = frozenset(option.name for option in OPTIONS if option.waits)
"""Names of the options whose edits apply only from the next start."""


def template() -> str:
    """Return the file of a new home: every option at its default, with its meaning."""
    lines = [
        "# What this peer may use of your machine. Only your nickname, and your figures if you share them, are sent to",
        "# others; nothing here changes how the swarm trains. You can edit the file while the peer runs; a change",
        "# applies within seconds. If the file is faulty, the peer says so and keeps the previous settings.",
    ]
    defaults = Settings()
    for option in OPTIONS:
        lines += ["", *(f"# {line}" for line in option.meaning.split("\n"))]
        lines.append(f"# Allowed: {option.allowed}.")
        value = getattr(defaults, option.name)
        shown = _shown(value)
        lines.append(f"{option.name} = {shown}")
    return "\n".join(lines) + "\n"


def _shown(value: str | float | bool) -> str:
    """Format a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def parse(text: str) -> Settings:
    """Parse settings. Raises ValueError with the name of the option and the allowed values."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not valid TOML: {error}") from None
    except ValueError:  # int() accepts at most 4,300 digits
        raise ValueError("it contains a number with thousands of digits") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    rows = {option.name: option for option in OPTIONS}
    for name, value in document.items():
        if name not in rows:
            near = difflib.get_close_matches(name, rows, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(rows)}"
            raise ValueError(f"there is no option {name[:40]!r}; {hint}")
        if not rows[name].fits(value):
            raise ValueError(f"{name} must be {rows[name].allowed}, but is {_found(value)}")
    floats = {each.name for each in fields(Settings) if isinstance(each.default, float)}
    chosen: dict[str, Any] = {name: float(value) if name in floats else value for name, value in document.items()}
    return Settings(**chosen)


def _found(value: object) -> str:
    """Format the beginning of a faulty value."""
    try:
        return repr(str(value)[:40])
    except (ValueError, RecursionError):  # a hexadecimal number of thousands of digits; deep nesting
        return "too long to be shown"


class SettingsFile:
    """The settings file of one home: call ``load`` at the start, then ``changed`` periodically from one thread."""

    def __init__(self, home: Path) -> None:
        self.path = home / SETTINGS_FILE
        self._read_at: Mark = None
        self._looked_at: Mark = None
        self._is_unread = False  # the last look or read failed

    def load(self) -> Settings:
        """Read the file; write the template first if there is none. Raises HomeError if it is faulty."""
        try:
            if not self.path.exists():
                files.write_new(self.path, template().encode())
            self._read_at = self._looked_at = self._mark()
            return self._read()
        except OSError as error:
            is_none = error.errno == errno.EINVAL  # not a regular file
            remedy = "Move it away; the next start writes a new one." if is_none else "Check its permissions."
            raise HomeError(f"{self.path} cannot be used: {error.strerror}.", remedy) from error
        except ValueError as error:
            remedy = "Fix it, or delete the file; the next start writes a new one."
            raise HomeError(f"{self.path} is faulty: {error}.", remedy) from None

    def changed(self) -> Settings | str | None:
        """Return the new settings after an edit, the reason if they are faulty, or None if nothing changed.

        A removed file means the defaults. An edit is read only when the file looks the same twice in a row, because
        some editors first empty it or move it away. An unreadable file is retried at each call, which returns why.
        """
        try:
            mark = self._mark()
            is_calm, self._looked_at = mark == self._looked_at, mark
            if not is_calm or (mark == self._read_at and not self._is_unread):
                return None
            self._read_at, self._is_unread = mark, False
            return Settings() if mark is None else self._read()
        except OSError as error:
            self._is_unread = True
            return error.strerror or str(error)
        except ValueError as error:
            return str(error)

    def _mark(self) -> Mark:
        """Return what changes with every edit; None without a file. Raises OSError."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):  # reading from a pipe may never end
            raise OSError(errno.EINVAL, "it is not a file")
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> Settings:
        """Read and parse the file. Raises OSError, and ValueError as ``parse`` does."""
        with self.path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        return parse(raw.decode("utf-8-sig", errors="replace"))
