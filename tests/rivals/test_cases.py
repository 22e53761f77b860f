"""Manifests of the runs of all rivals."""

from __future__ import annotations

import pytest

from bench.rivals.cases import RIVALS, SIZES, RivalCase, RivalName
from p2ptrain.manifest import preset, with_changes


@pytest.mark.parametrize("peers", [4, 8])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rival", RIVALS)
def test_every_peer_warms_up_for_as_long_whatever_their_number(rival: RivalName, size: str, peers: int) -> None:
    case = RivalCase(rival, size, peers, seed=1)
    manifest = with_changes(preset(SIZES[size].preset, "00" * 32), case.manifest_changes())
    assert manifest.training.warmup_tokens == {"demo": 60_000, "llama-15m": 5_000}[size] * peers
    assert manifest.training.schedule == "constant"
