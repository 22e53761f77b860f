"""The dashboard asks for names that are exported, and for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from p2ptrain.page.metrics import exposition, names
from p2ptrain.page.view import PeerRow, View

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())


def asked() -> set[str]:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return {name for each in expressions for name in re.findall(r"p2ptrain_\w+", each)}


def test_every_name_in_the_dashboard_is_exported() -> None:
    assert asked() <= names()
    assert len(asked()) > 8


def test_what_is_exported_has_these_names() -> None:
    row = PeerRow(
        "12D3KooWabcdef",
        "fox",
        "training",
        3,
        5.0,
        tokens_per_s=1.0,
        loss=2.0,
        held_out=2.0,
        disagreement=0.1,
        up=1.0,
        down=2.0,
    )
    view = View("bootstrap")
    view.place([row, PeerRow("gone", state="gone")])
    totals = ("tokens", "tokens_per_s", "fraction", "exchanges", "failed", "loss", "held_out", "disagreement")
    view.figures = dict.fromkeys((*totals, "blocked_share", "sent_bytes", "received_bytes"), 1.0)
    lines = exposition(view.document(0.0)).decode().splitlines()
    found = {re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#")}
    assert found == names()
    assert 'p2ptrain_peer_outer_steps{nickname="fox",peer="abcdef"} 3.0' in lines
    assert not any('peer="gone"' in line for line in lines)
