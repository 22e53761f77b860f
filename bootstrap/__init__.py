"""The bootstrap: a run's well-known entry point.

It keeps a stable identity on disk, takes part in the DHT, hands out the run's signed manifest and prints the join link.
It never trains, and peers that know each other do not need it: when it goes away, training goes on, and when it comes
back, it finds its swarm again through the peers it remembers.

``p2ptrain bootstrap RUN`` and ``python -m bootstrap RUN`` start it. ``app`` is the program, ``words`` what it says,
``doorman`` what it does where a run does not take everybody, ``swarm_view`` what its page shows (``sums``: what stands
there for everybody; ``texts``: whose text), ``cli`` its command line.
"""
