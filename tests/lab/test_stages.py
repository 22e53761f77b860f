"""What a stage can tell about its hosts."""

from __future__ import annotations

from pathlib import Path

from lab.stages import interface_bytes

TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 1000       1    0    0    0     0          0         0     1000       1    0    0    0     0       0          0
  wan0:  300       2    0    0    0     0          0         0       70       3    0    0    0     0       0          0
  wan1:    5       2    0    0    0     0          0         0        1       3    0    0    0     0       0          0
"""


def test_bytes_of_all_lines_are_counted_without_the_loopback(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(TABLE)
    assert interface_bytes(table) == 376
