"""Document as Prometheus metrics: names with units, gauges and counters (docs/PAGE.md, docs/grafana.json).

Each scrape makes a new registry from one document, so nothing is counted twice and departed peers disappear. A sum over
present peers falls when one leaves, so it is a gauge; only a single peer's own count is a counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

TOTALS = {
    "tokens": ("tokens", "Tokens trained on by reporting peers.", True),
    "exchanges": ("exchanges", "Exchanges made.", True),
    "failed": ("exchanges_failed", "Exchanges that failed.", True),
    "sent_bytes": ("sent_bytes", "Bytes sent.", True),
    "received_bytes": ("received_bytes", "Bytes received.", True),
    "fraction": ("run_progress_ratio", "Completed share of the run.", False),
    "tokens_per_s": ("tokens_per_second", "Recent tokens per second of reporting peers.", False),
    "swarm_tokens_per_s": ("swarm_tokens_per_second", "Estimate of the tokens per second of all peers.", False),
    "remaining_s": ("run_remaining_seconds", "Estimated time to the run's end.", False),
    "shortened_s": ("run_shortened_seconds", "Time by which this peer shortens the run.", False),
    "up": ("sent_bytes_per_second", "Recent bytes per second sent by reporting peers.", False),
    "down": ("received_bytes_per_second", "Recent bytes per second received by reporting peers.", False),
    "blocked_share": ("blocked_ratio", "Share of time that the trainer waited for exchanges.", False),
    "disagreement": ("disagreement_ratio", "Relative distance between partners' weights before an exchange.", False),
    "loss": ("training_loss_nats", "Training loss in nats per token.", False),
    "held_out": ("held_out_loss_nats", "Held-out loss in nats per token.", False),
}
"""Figures of the document: name, help text, and whether a peer's own value only grows. Growing ones are
``p2ptrain_…_total`` of a peer and ``p2ptrain_swarm_…`` of a swarm."""

OF_PEERS = {
    "loss": ("p2ptrain_peer_training_loss_nats", "Training loss in nats per token."),
    "held_out": ("p2ptrain_peer_held_out_loss_nats", "Held-out loss in nats per token."),
    "tokens_per_s": ("p2ptrain_peer_tokens_per_second", "Recent tokens per second."),
    "disagreement": ("p2ptrain_peer_disagreement_ratio", "Relative distance to partners before an exchange."),
    "step": ("p2ptrain_peer_outer_steps", "Outer steps done."),
    "progress": ("p2ptrain_peer_progress_tokens", "Estimate of the tokens that all peers trained on."),
    "age_s": ("p2ptrain_peer_record_age_seconds", "Age of its presence record."),
    "up": ("p2ptrain_peer_sent_bytes_per_second", "Recent bytes per second sent."),
    "down": ("p2ptrain_peer_received_bytes_per_second", "Recent bytes per second received."),
    "blocked_share": ("p2ptrain_peer_blocked_ratio", "Share of time that its trainer waited for exchanges."),
}
"""Fields of a peer's row. Their only label is the last six characters of its id."""

COUNTS_OF_PEERS = {
    "tokens": ("p2ptrain_peer_tokens", "Tokens trained on."),
    "exchanges": ("p2ptrain_peer_exchanges", "Exchanges made; its partners count them too."),
    "failed": ("p2ptrain_peer_exchanges_failed", "Exchanges that failed; its partners count them too."),
    "sent_bytes": ("p2ptrain_peer_sent_bytes", "Bytes sent."),
    "received_bytes": ("p2ptrain_peer_received_bytes", "Bytes received."),
}
"""Fields of a peer's row that only grow while it runs. Prometheus adds ``_total``."""

INFO = "p2ptrain_peer_info"
"""Metric with a peer's texts in one series: as labels of all series, each new nickname would start all of them anew."""


class MetricFamilies(Collector):
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def collect(self) -> Iterator[Any]:
        document = self._document
        yield GaugeMetricFamily("p2ptrain_peers", "Peers that are present.", value=document["total_peers"])
        for name, (metric, help_text, grows) in TOTALS.items():
            if (value := document["figures"].get(name)) is None:
                continue
            if grows and document["kind"] == "peer":
                yield CounterMetricFamily(f"p2ptrain_{metric}", help_text, value=value)
            else:
                scope = "swarm_" if grows else ""
                yield GaugeMetricFamily(f"p2ptrain_{scope}{metric}", help_text, value=value)
        rows = [row for row in document["peers"] if row["state"] != "gone"]
        if document["kind"] == "peer":  # if all peers are scraped, the others report themselves
            rows = [row for row in rows if row["id"] == document["me"]]
        labels = _labels([row["id"] for row in rows])
        info = GaugeMetricFamily(INFO, "1 for each present peer.", labels=["peer", "nickname", "device"])
        for row, label in zip(rows, labels, strict=True):
            info.add_metric([label, row["nickname"], row["device"] or ""], 1.0)
        yield info
        for fields, kind in ((OF_PEERS, GaugeMetricFamily), (COUNTS_OF_PEERS, CounterMetricFamily)):
            for name, (metric, help_text) in fields.items():
                family = kind(metric, help_text, labels=["peer"])
                for row, label in zip(rows, labels, strict=True):
                    if row.get(name) is not None:
                        family.add_metric([label], row[name])
                yield family


def _labels(ids: list[str]) -> list[str]:
    """Return the last six characters of each id, the whole id if two end alike: Prometheus rejects duplicates."""
    ends = Counter(each[-6:] for each in ids)
    return [each[-6:] if ends[each[-6:]] == 1 else each for each in ids]


def exposition(document: Mapping[str, Any]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricFamilies(document))
    return generate_latest(registry)
