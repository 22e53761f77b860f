"""p2ptrain: many strangers' computers pre-train one language model together.

There is no server, rank, world size or barrier. Each peer trains on its own data for H inner steps, folds the result
into its slow weights with an outer optimizer, and exchanges compressed weights with random live peers while it trains.
``docs/ARCHITECTURE.md`` describes the structure; the layers, low to high, are::

    0  ids, errors
    1  outer, codec (numeric core: tensors in, tensors out)   |   swarm (protocol core: events in, effects out)
    2  manifest, recipes, wire, ports, telemetry
    3  train, data, checkpoint
    4  net, sim
    5  peer, bootstrap (applications), cli

A module imports only from lower layers; ``tests/test_house.py`` enforces it.
"""

__version__ = "0.1.0"
