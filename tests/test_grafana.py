"""The dashboard uses all exported names, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from p2ptrain.page.figures import OF_PEERS, OF_RECORDS, OF_RUNS
from p2ptrain.page.metrics import exposition
from p2ptrain.page.view import PeerRow, View

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())


def asked() -> set[str]:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return {name for each in expressions for name in re.findall(r"p2ptrain_\w+", each)}


def test_every_name_in_the_dashboard_is_exported() -> None:
    assert asked() <= {name_of(line) for line in scraped()}
    assert len(asked()) > 8


def test_each_question_of_a_panel_has_a_name_of_its_own() -> None:
    """Check the reference of each query of a panel: Grafana shows only one of two equal ones."""
    for panel in DASHBOARD["panels"]:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel["title"]


def test_rates_are_of_what_only_grows() -> None:
    """Check that rates are of counters, whose names end in _total: a falling gauge would look like a reset counter."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            rated = set(re.findall(r"rate\((p2ptrain_\w+)\[", target["expr"]))
            assert rated == set(re.findall(r"p2ptrain_\w+_total\b", target["expr"])), panel["title"]


def scraped() -> list[str]:
    """Return the metrics of one peer with all values, as a bootstrap and the peer itself export them."""
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
        tokens=7,
        exchanges=4,
        failed=1,
        up=1.0,
        down=2.0,
        sent_bytes=9,
        received_bytes=8,
        blocked_share=0.1,
    )
    lines = [*told_by(View("bootstrap"), row), *told_by(View("peer", me=row.id), row)]
    return [line for line in lines if line and not line.startswith("#")]


def name_of(line: str) -> str:
    return re.split(r"[{ ]", line)[0]


def test_what_is_exported_has_these_names() -> None:
    lines = scraped()
    ours, of_peers = len(OF_PEERS | OF_RUNS), len(OF_PEERS | OF_RECORDS)
    growing = sum(figure.is_count for figure in OF_PEERS.values())
    assert len({name_of(line) for line in lines}) == 2 + ours + growing + of_peers
    assert 'p2ptrain_peer_outer_steps{peer="abcdef"} 3.0' in lines
    assert 'p2ptrain_peer_exchanges_total{peer="abcdef"} 4.0' in lines
    assert 'p2ptrain_peer_info{device="",nickname="fox",peer="abcdef"} 1.0' in lines
    assert not any('peer="gone"' in line for line in lines)


def test_a_peer_tells_prometheus_of_itself_alone() -> None:
    """Check a peer's own metrics: if all peers are scraped, each must appear once."""
    view = View("peer", me="12D3KooWabcdef")
    view.place([PeerRow("12D3KooWabcdef", "fox", "training"), PeerRow("12D3KooWother1", "hen", "training")])
    told = exposition(view.document(0.0)).decode()
    assert 'peer="abcdef"' in told
    assert "other1" not in told
    assert "p2ptrain_peers 2.0" in told


def told_by(view: View, row: PeerRow) -> list[str]:
    """Return what a scrape of a peer's own page gets."""
    view.place([row, PeerRow("gone", state="gone")])
    view.figures = dict.fromkeys(OF_PEERS | OF_RUNS, 1.0)
    return exposition(view.document(0.0)).decode().splitlines()
