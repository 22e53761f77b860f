"""The owner's hand on a peer that runs: settings that count at once, and commands from another terminal.

Whoever lends a machine decides at any moment how much of it is lent: how fast it may send and receive, how much in a
month, at which hours, and whether it rests just now. None of this changes the algorithm or is told to others; a peer
that rests, or has used up its month, has left the swarm in all politeness (``peer.participation``) and joins it again.

========  =============================================================================================================
settings  ``HOME/settings.toml``: its options, their meanings and bounds, in one table
traffic   ``HOME/traffic.json``: bytes sent and received, by calendar month
pause     ``HOME/paused.json``: there while the owner has paused the peer, also after the process
wishes    what follows from commands, settings, the hour and the month: one pure decision
hand      the thread that watches all of these and tells the rest of the peer
door      the Unix socket in the home: one JSON line in, one out; and the client's side of it
status    what a peer is doing, as figures and as a screen
commands  ``p2ptrain status``, ``pause``, ``resume``, ``finish``
========  =============================================================================================================

The hand is one thread of its own, the only one that writes any of its state. It needs no network, so a peer that trains
alone has it too, and it goes on when the network's loop or the trainer is busy.
"""
