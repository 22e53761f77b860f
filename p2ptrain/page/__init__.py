"""Observation of a peer, a swarm or a simulation: a web page, JSON and Prometheus metrics.

Importing this package imports neither aiohttp nor prometheus-client, which the extra ``page`` installs. The page itself
(``static``, with uPlot under MIT) loads nothing from elsewhere.
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
