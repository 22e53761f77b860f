"""Figure 6: side by side on home lines. ``swarm`` against ``diloco`` over the same network, and against hivemind's own
averager with the same model, data and inner optimizer.

Every peer is a process on a host of its own (``peer.lab.hosts``) behind a line of 100 Mbit/s down and 20 up with 20 ms
each way; all share one machine's cores. One run: everybody trains; after a calm time one peer is killed (SIGKILL, its
daemons too); later a new one comes; then all are asked to leave. What is read afterwards is the same for all three:

- bytes, from the counters of each host's line, everything below us included;
- progress notes, at most one in two seconds, which say how far training is.

``diloco`` is our recipe of that name: a complete graph in which everybody waits for everybody. ``averager`` is
``hivemind.averaging.DecentralizedAverager`` at its own defaults, fp16 on the wire, one group of everybody: H local
steps, then an average of the weights (``bench.rivals.averager``).
"""
