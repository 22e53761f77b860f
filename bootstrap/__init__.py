"""The bootstrap: a run's well-known entry point.

A bootstrap keeps a stable identity on disk, takes part in the DHT, serves the run's signed manifest and prints the join
link. It never trains. Peers that know each other do not need it: training continues without it, and a restarted
bootstrap finds its swarm through the peers in its cache.
"""
