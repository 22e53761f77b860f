"""The owner's control of a running peer: settings that apply at once, and commands from another terminal.

The owner of a machine decides at any moment how much of it to lend: send and receive rates, monthly traffic, hours, and
whether the peer is paused. None of this changes the algorithm or is sent to others. A peer that is paused or has used
up its monthly traffic has left the swarm properly (``peer.participation``) and rejoins it later.

==============  =======================================================================================================
settings        ``HOME/settings.toml``: its options, their meanings and bounds, in one table
traffic         ``HOME/traffic.json``: bytes sent and received, by calendar month
pause           ``HOME/paused.json``: exists while the owner has paused the peer, also between two processes
policy          what follows from commands, settings, the hour and the month: a pure function
control         the thread that watches all of these and controls the rest of the peer
control_socket  the Unix socket in the home, server and client: one JSON line per request and answer
status          what a peer is doing, as figures and as a screen
commands        ``p2ptrain status``, ``pause``, ``resume``, ``finish``
==============  =======================================================================================================

``OwnerControl`` is a separate thread, the only one that writes its state. It needs no network, so it also serves a peer
that trains alone, and it runs while the network loop or the trainer is busy.
"""
