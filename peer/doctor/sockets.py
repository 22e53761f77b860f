"""The local port of a TCP connection (Linux only; unknown elsewhere)."""

from __future__ import annotations

import ipaddress
from pathlib import Path

_ESTABLISHED = "01"  # include/net/tcp_states.h
_TABLE = Path("/proc/net/tcp")


def sent_from(host: str, port: int) -> int:
    """Return the local port of the only connection to an IPv4 address and port; 0 if none, several or unknown."""
    try:
        text = _TABLE.read_text()
    except OSError:
        return 0
    return local_port(text, host, port)


def local_port(table: str, host: str, port: int) -> int:
    """Find the local port of that connection in the text of /proc/net/tcp; 0 as ``sent_from``. Pure."""
    try:
        packed = ipaddress.IPv4Address(host).packed
    except ValueError:
        return 0
    # The kernel prints the address as one number in the machine's byte order, little-endian wherever p2pd runs.
    remote = f"{int.from_bytes(packed, 'little'):08X}:{port:04X}"
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[2] == remote and fields[3] == _ESTABLISHED:
            found.append(int(fields[1].partition(":")[2], 16))
    return found[0] if len(found) == 1 else 0
