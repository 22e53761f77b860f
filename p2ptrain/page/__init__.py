"""Observation of a peer, a swarm or a simulation: a web page, JSON and Prometheus metrics.

Importing this package imports neither aiohttp nor prometheus-client, which the extra ``page`` installs. The page itself
(``static``, with uPlot under MIT) loads nothing from elsewhere.
"""
