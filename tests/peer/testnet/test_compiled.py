"""The compiled step of a testnet: when it is made, and what happens if it cannot be."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest
import torch
from filelock import FileLock, Timeout

from p2ptrain.manifest import Manifest, preset, with_changes
from peer.testnet import compiled
from peer.testnet.compiled import compile_step, compiling_step

DEMO = preset("demo", "ab" * 32)
WRITES = """
import hashlib, pathlib, sys
sys.stdin.read()
library = pathlib.Path(sys.argv[1])
library.with_suffix(".digest").write_text(hashlib.sha256(b"").hexdigest())
library.write_bytes(b"")
"""
FAILS = "import sys; sys.exit('no memory')"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("P2PTRAIN_COMPILE", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("p2ptrain.train.compiling.compiler_program", lambda environment: "/usr/bin/g++")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return tmp_path / "p2ptrain" / "compiled"


def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, manifest: Manifest = DEMO) -> list[str]:
    """Return what the testnet says while this Python program stands for the compiler."""
    monkeypatch.setattr(compiled, "launched", lambda *command: [sys.executable, "-c", script, command[-1]])
    lines: list[str] = []

    async def compile_it() -> None:
        decided = asyncio.Event()
        await compile_step(manifest, 1, tmp_path / "compiler.log", lines.append, decided)
        assert decided.is_set()

    asyncio.run(compile_it())
    return lines


def test_the_step_is_compiled_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line[:27] for line in said(tmp_path, monkeypatch, WRITES)] == ["compiling the training step"]
    assert len(list(cache.glob("torch-*/*.so"))) == 1
    assert said(tmp_path, monkeypatch, FAILS) == []


def test_without_a_library_the_testnet_trains_all_the_same(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "compiler.log"
    assert said(tmp_path, monkeypatch, FAILS)[1:] == [f"training without compiled code; {log} says why"]
    assert log.read_text().strip() == "no memory"
    (failed,) = cache.glob("torch-*/*.failed")
    (line,) = said(tmp_path, monkeypatch, WRITES)
    assert line == f"training without compiled code: no memory; to try again, delete {failed}"
    cache.chmod(0o777)
    (line,) = said(tmp_path, monkeypatch, WRITES)
    assert line.startswith("training without compiled code: other users can write to ")


def test_a_compiler_that_hangs_is_ended(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "DEADLINE_S", 0.2)
    assert len(said(tmp_path, monkeypatch, "import time; time.sleep(600)")) == 2
    assert not list(cache.glob("torch-*/*.failed"))  # a slow machine may be faster at another time


def test_the_compiler_runs_beside_the_testnet_and_ends_with_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the block runs while the compiler holds the lock, and that its end ends the compiler."""
    hangs = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    monkeypatch.setattr(compiled, "launched", lambda *command: [sys.executable, "-c", hangs])
    log, lines = tmp_path / "compiler.log", list[str]()

    async def testnet() -> int:
        async with compiling_step(DEMO, 1, log, lines.append):
            (lock,) = cache.glob("torch-*/*.lock")
            with pytest.raises(Timeout):
                FileLock(lock).acquire(timeout=0)
            while not (log.exists() and log.read_text()):
                await asyncio.sleep(0.01)
        return int(log.read_text())

    assert not psutil.pid_exists(asyncio.run(testnet()))
    assert [line[:27] for line in lines] == ["compiling the training step"]


def test_nothing_is_compiled_where_peers_would_not_use_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = with_changes(DEMO, {"model.config.hidden_size": 512})
    assert said(tmp_path, monkeypatch, FAILS, large) == []
    with monkeypatch.context() as patch:
        patch.setattr("p2ptrain.train.compiling.compiler_program", lambda environment: None)
        assert [line[:24] for line in said(tmp_path, patch, FAILS)] == ["there is no C++ compiler"]
    monkeypatch.setenv("P2PTRAIN_COMPILE", "off")
    assert said(tmp_path, monkeypatch, FAILS) == []
