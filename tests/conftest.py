"""Fixtures for all tests: one torch thread, a folder for sockets, and a check for leftovers at the end.

Every process that a test starts inherits the mark set here, so that leftovers are recognized even if their parent
is gone.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

MARK = "P2PTRAIN_TEST_SESSION"
LONGEST = frozenset(
    {
        "test_owner_control_of_real_peers.py",
        "test_swarm_endures.py",
        "test_swarm_learns.py",
        "test_readme.py",
        "test_files_by_link.py",
        "test_without_bootstrap.py",
        "test_lab_process.py",
    }
)
GRACE_S = 15.0
"""Grace, in seconds, for processes that were told to end, or whose parent just died."""

# Before torch is imported, which reads this once. More threads than cores make every test slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["P2PTRAIN_COMPILE"] = "off"  # compilers take minutes; tests of compilation start their own
os.environ[MARK] = uuid.uuid4().hex
# No property depends on how busy the machine is. The same examples in every run, so that a change is judged by what it
# changes; ``make fuzz`` draws new ones.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("default"), derandomize=True)
settings.load_profile("repeatable")
gc.disable()  # until all modules are imported: see p2ptrain.base.imports
# Keep compiled modules: compiling takes half a second of every child's start, and six seconds of every worker's.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell's background job ignores Ctrl+C, and so would every process that a test starts in order to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m "net …"`` or ``-m lab``, import only files that have such tests: it takes half the time."""
    mark = config.option.markexpr.partition(" ")[0]
    if mark not in ("net", "lab") or collection_path.suffix != ".py":
        return None
    return f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take minutes first, so that no worker ends long after the others."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Check that no process of ours outlives the tests, nor a socket folder that the next start would keep."""
    tmp_path_factory.getbasetemp()  # at the system's default place, where people look for it after a failure
    with tempfile.TemporaryDirectory(prefix="p2pt-", dir="/tmp", ignore_cleanup_errors=True) as ours:
        before = {"TMPDIR": os.environ.get("TMPDIR")}
        os.environ["TMPDIR"], tempfile.tempdir = ours, None
        yield
        left = survivors()
        commands = [command(process) for process in left]
        for process in left:
            process.kill()
        psutil.wait_procs(left)
        folders = unswept(Path(ours))
        tempfile.tempdir = None
        if before["TMPDIR"] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before["TMPDIR"]
    assert not left, f"left running: {commands}"
    assert not folders, f"left in the temporary directory: {folders}"


def survivors() -> list[psutil.Process]:
    """Return other processes with this session's mark that do not end within the grace."""
    mark = os.environ[MARK]
    ours = [each for each in psutil.process_iter() if each.pid != os.getpid() and _has_mark(each, mark)]
    return psutil.wait_procs([each for each in ours if not _is_our_tracker(each)], timeout=GRACE_S)[1]


def _is_our_tracker(process: psutil.Process) -> bool:
    """Whether this is the child with which Python 3.14 tracks semaphores, until this process ends."""
    try:
        return process.ppid() == os.getpid() and any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def command(process: psutil.Process) -> str:
    try:
        return f"{process.pid} of {process.ppid()}: {' '.join(process.cmdline())}"
    except psutil.Error:  # it has just ended
        return str(process)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:  # another user's, or just ended
        return False


def unswept(parent: Path) -> list[str]:
    """Return socket folders that the next start would not remove, as it does those of killed processes."""
    if not list(parent.glob("p2ptrain.*")):
        return []
    from p2ptrain.net.p2pd.socket_folder import sweep

    sweep(parent)
    return [folder.name for folder in parent.glob("p2ptrain.*")]
