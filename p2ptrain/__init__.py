"""p2ptrain: many strangers' computers pre-train one language model together.

There is no server, rank, world size or barrier. Each peer trains on its own data for H inner steps, folds the result
into its slow weights with an outer optimizer, and exchanges compressed weights with random live peers while it trains.
``docs/ARCHITECTURE.md`` describes the structure.
"""

__version__ = "0.1.0"
