"""The owner's control of a running peer: settings that apply at once, and commands from another terminal.

The owner of a machine decides at any moment how much of it to lend: send and receive rates, monthly traffic, hours, and
whether the peer is paused. None of this changes the algorithm or is sent to others. A peer that is paused or has used
up its monthly traffic has left the swarm properly (``peer.participation``) and rejoins it later.
"""
