"""Import of the network shell on unusual machines."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_SEMAPHORES = """
import _multiprocessing, errno

class Refused(_multiprocessing.SemLock):
    def __new__(cls, *_):
        raise OSError(errno.EROFS, "Read-only file system")

_multiprocessing.SemLock = Refused
import p2ptrain.net.dht

import sys
needless = {"hivemind.averaging", "hivemind.moe", "hivemind.optim", "scipy", "torch.distributed.checkpoint"}
assert sys.modules.keys().isdisjoint(needless)
"""


def test_the_network_works_without_a_writable_dev_shm_and_imports_little() -> None:
    """Check that hivemind can be imported where the system gives no semaphores, as in some containers.

    Only its network part is imported.
    """
    subprocess.run([sys.executable, "-c", WITHOUT_SEMAPHORES], check=True, timeout=120)


def test_hivemind_s_locks_start_no_process() -> None:
    """Check that there is no tracker of semaphores, as Python 3.14 starts one for locks of its default context."""
    code = "import psutil, p2ptrain.net.dht; assert psutil.Process().children() == []"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
