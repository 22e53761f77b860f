"""Document as Prometheus metrics: names with units, gauges and counters (docs/PAGE.md, docs/grafana.json).

A count is ``p2ptrain_…_total`` of a peer. The sum over present peers, ``p2ptrain_swarm_…``, falls when one leaves, so
it is a gauge. Each scrape makes a new registry from one document, so nothing is counted twice and departed peers
disappear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from p2ptrain.page.figures import OF_PEERS, OF_RECORDS, OF_RUNS

CONTENT_TYPE = CONTENT_TYPE_LATEST

INFO = "p2ptrain_peer_info"
"""Metric with a peer's texts in one series: as labels of all series, each new nickname would start all of them anew."""


class MetricFamilies(Collector):
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def collect(self) -> Iterator[Any]:
        document = self._document
        yield GaugeMetricFamily("p2ptrain_peers", "Peers that are present.", value=document["total_peers"])
        for name, figure in (OF_PEERS | OF_RUNS).items():
            if (value := document["figures"].get(name)) is None:
                continue
            if figure.is_count and document["kind"] == "peer":
                yield CounterMetricFamily(f"p2ptrain_{figure.metric}", figure.help, value=value)
            else:
                scope = "swarm_" if figure.is_count else ""
                yield GaugeMetricFamily(f"p2ptrain_{scope}{figure.metric}", figure.help, value=value)
        rows = [row for row in document["peers"] if row["state"] != "gone"]
        if document["kind"] == "peer":  # if all peers are scraped, the others report themselves
            rows = [row for row in rows if row["id"] == document["me"]]
        labels = _labels([row["id"] for row in rows])
        info = GaugeMetricFamily(INFO, "1 for each present peer.", labels=["peer", "nickname", "device"])
        for row, label in zip(rows, labels, strict=True):
            info.add_metric([label, row["nickname"], row["device"] or ""], 1.0)
        yield info
        for name, figure in (OF_PEERS | OF_RECORDS).items():
            kind = CounterMetricFamily if figure.is_count else GaugeMetricFamily
            family = kind(f"p2ptrain_peer_{figure.metric}", figure.help, labels=["peer"])
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
