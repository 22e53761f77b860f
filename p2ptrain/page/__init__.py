"""What can be watched: a view of a peer, a swarm or a simulation, as a web page, as JSON and for Prometheus.

==========  =================================================================
view        ``View``: the one document, bounded (pure)
untrusted   strangers' words and numbers, made fit to be shown (pure)
place       ``Place``: where it is served, and whether it can be
metrics     the same for Prometheus (extra ``page``)
server      ``PageServer``: HTTP, read-only (extra ``page``)
static      the page itself, with uPlot (MIT); it asks nobody else for anything
==========  =================================================================

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
