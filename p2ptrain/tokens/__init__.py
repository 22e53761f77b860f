"""A run's text as its author tokenized it: shards of ids, found by digest, in each peer's own order.

The author cuts the ids into shards; the ``index`` has their digests, and the manifest the index's: a hash tree of two
levels. The ``walk`` says which sequences a peer reads at which step, hence which shards it needs next; the ``store``
keeps them on disk; a ``corpus`` reads batches from there. Nothing here interprets a stranger's data, except as integers
of fixed size.
"""
