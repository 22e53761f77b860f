"""Observation of a peer, a swarm or a simulation: a web page, JSON and Prometheus metrics.

==============  =============================================================
view            ``View``: the bounded state and its document (pure)
untrusted       bounds and cleans text and numbers from strangers (pure)
listen_address  ``ListenAddress``: where the page is served
metrics         the document for Prometheus (extra ``page``)
server          ``PageServer``: HTTP, read-only (extra ``page``)
static          the page itself, with uPlot (MIT); loads nothing from elsewhere
==============  =============================================================

Importing this package imports neither aiohttp nor prometheus-client.
"""

from p2ptrain.page.untrusted import number, paragraph, words
from p2ptrain.page.view import (
    CheckpointRow,
    ExchangeRow,
    FailureRow,
    PeerRow,
    RunFacts,
    SampleText,
    View,
    plain,
    row_of,
)

__all__ = [
    "CheckpointRow",
    "ExchangeRow",
    "FailureRow",
    "PeerRow",
    "RunFacts",
    "SampleText",
    "View",
    "number",
    "paragraph",
    "plain",
    "row_of",
    "words",
]
