"""Comparison of ``swarm``, ``diloco`` and hivemind's averager on home lines.

All three have the same model, data and inner optimizer; the first two also the same network.

Every peer is a process on a host of its own (``lab.hosts``) behind a line of 100 Mbit/s down and 20 up with 20 ms
each way; all share the cores of one machine. In a run all peers train, one peer and its daemons are killed (SIGKILL),
a new peer joins, and all are stopped. The same sources are read for all three rivals:

- bytes: the counters of each host's line, all protocol layers included;
- progress: notes of the event log, at most one in two seconds.

``diloco`` is our recipe of that name on a complete graph, where all peers wait for each other. ``averager`` is
``hivemind.averaging.DecentralizedAverager`` at its own defaults, fp16 on the wire, one group of everybody: H local
steps, then an average of the weights (``bench.rivals.averager``).
"""
