"""The limit of open files of this process, sockets included."""

from __future__ import annotations

import contextlib
import resource


def allow(wanted: int) -> None:
    """Raise the limit of open files to ``wanted``, or as far as the system permits; child processes inherit it.

    Services of systemd and logins start with 1,024, and may raise that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit that it does not name
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
