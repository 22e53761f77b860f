"""The document for Prometheus: names with units, gauges and counters (docs/PAGE.md, docs/grafana.json).

A registry is made for each scrape from one document, so that nothing is counted twice and nobody who has gone stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

TOTALS = {
    "tokens": ("p2ptrain_tokens", "Tokens trained on by those who tell.", True),
    "exchanges": ("p2ptrain_exchanges", "Exchanges made.", True),
    "failed": ("p2ptrain_exchanges_failed", "Exchanges that failed.", True),
    "sent_bytes": ("p2ptrain_sent_bytes", "Bytes sent.", True),
    "received_bytes": ("p2ptrain_received_bytes", "Bytes received.", True),
    "fraction": ("p2ptrain_run_progress_ratio", "Share of the run that is done.", False),
    "tokens_per_s": ("p2ptrain_tokens_per_second", "Tokens a second, lately, of those who tell.", False),
    "blocked_share": ("p2ptrain_blocked_ratio", "Share of time in which the trainer waited.", False),
    "disagreement": ("p2ptrain_disagreement_ratio", "How far apart partners' weights are before an exchange.", False),
    "loss": ("p2ptrain_training_loss_nats", "Training loss, nats a token.", False),
    "held_out": ("p2ptrain_held_out_loss_nats", "Loss on text that nobody trains on, nats a token.", False),
}
"""Figures of the document: a name, a help text, and whether it only grows."""

OF_PEERS = {
    "loss": ("p2ptrain_peer_training_loss_nats", "Training loss, nats a token."),
    "held_out": ("p2ptrain_peer_held_out_loss_nats", "Loss on text that nobody trains on, nats a token."),
    "tokens_per_s": ("p2ptrain_peer_tokens_per_second", "Tokens a second, lately."),
    "disagreement": ("p2ptrain_peer_disagreement_ratio", "Distance to partners before an exchange."),
    "step": ("p2ptrain_peer_outer_steps", "Outer steps done."),
    "progress": ("p2ptrain_peer_progress_tokens", "Progress in tokens per peer."),
    "age_s": ("p2ptrain_peer_record_age_seconds", "Age of its presence record."),
    "up": ("p2ptrain_peer_sent_bytes_per_second", "Bytes a second sent, lately."),
    "down": ("p2ptrain_peer_received_bytes_per_second", "Bytes a second received, lately."),
}
"""Fields of a peer's row. Labels: its id's last six characters, and its nickname."""


class Snapshot(Collector):
    """One document as families of metrics."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def collect(self) -> Iterator[Any]:
        document = self._document
        yield GaugeMetricFamily("p2ptrain_peers", "Peers that are there.", value=document["total_peers"])
        for name, (metric, told, grows) in TOTALS.items():
            if (value := document["figures"].get(name)) is not None:
                kind = CounterMetricFamily if grows else GaugeMetricFamily
                yield kind(metric, told, value=value)
        for name, (metric, told) in OF_PEERS.items():
            family = GaugeMetricFamily(metric, told, labels=["peer", "nickname"])
            for row in document["peers"]:
                if row["state"] != "gone" and row.get(name) is not None:
                    family.add_metric([row["id"][-6:], row["nickname"]], row[name])
            yield family


def exposition(document: Mapping[str, Any]) -> bytes:
    """What a scrape gets."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot(document))
    return generate_latest(registry)


def names() -> set[str]:
    """Every name that is ever exported, as Prometheus stores it: counters end in _total."""
    totals = {metric + ("_total" if grows else "") for metric, _, grows in TOTALS.values()}
    return {"p2ptrain_peers", *totals, *(metric for metric, _ in OF_PEERS.values())}
