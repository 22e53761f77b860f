"""The run that the bootstraps of these tests serve."""

from __future__ import annotations

import pytest

from p2ptrain.manifest import SignedManifest, create_run, load_run, sign_run


@pytest.fixture(scope="session")
def signed(tmp_path_factory: pytest.TempPathFactory) -> SignedManifest:
    run = tmp_path_factory.mktemp("bootstrap") / "run"
    create_run(run, "demo")
    sign_run(run)
    return load_run(run)
