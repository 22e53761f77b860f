"""A run that takes invited peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.manifest import SignedManifest, create_run, sign_run


@pytest.fixture
def private_run(tmp_path: Path) -> tuple[Path, SignedManifest]:
    """A directory with a run that takes invited peers."""
    create_run(tmp_path / "run", "demo", {"admission.policy": "invite"})
    return tmp_path / "run", sign_run(tmp_path / "run").signed
