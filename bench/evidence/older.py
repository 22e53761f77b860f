"""An older commit as it ran: its files in a folder of their own, and workers that simulate with them."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.evidence.identity import ROOT
from bench.evidence.pool import Pool

PATIENCE_S = 120
"""For git, and for an older commit's digest: both take seconds."""


class OlderCodeError(Exception):
    """That commit cannot be run here; the text says why."""


@contextmanager
def older(commit: str, code: str, workers: int, simulate: str, device: str) -> Iterator[Pool]:
    """Workers on a commit's files.

    Args:
        commit: as git knows it.
        code: the numeric digest that its files must have.
        workers: how many.
        simulate, device: as ``Pool`` takes them.

    Raises:
        OlderCodeError: the commit is not in this clone, or is other code than was recorded.
    """
    with TemporaryDirectory(prefix="p2ptrain-older-") as folder:
        root = Path(folder) / "tree"
        _unpack(commit.removesuffix("-dirty"), root)  # whatever was changed there: the digest decides
        if (found := _digest(root)) != code:
            raise OlderCodeError(f"commit {commit} has the numeric digest {found or 'none'}, not {code}")
        with Pool(workers, simulate, device, root) as pool:
            yield pool


def _unpack(commit: str, root: Path) -> None:
    packed = root.with_suffix(".tar")
    done = _run(["git", "archive", "--format=tar", f"--output={packed}", commit], ROOT)
    if done.returncode:
        raise OlderCodeError(f"commit {commit} is not in this clone; git fetch --unshallow brings all of them")
    with tarfile.open(packed) as archive:
        archive.extractall(root, filter="data")


def _digest(root: Path) -> str:
    question = "from bench.evidence.identity import numeric_digest; print(numeric_digest())"
    return _run([sys.executable, "-c", question], root).stdout.strip()


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OlderCodeError(f"{command[0]}: {error}") from None
