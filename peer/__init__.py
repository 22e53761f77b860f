"""The peer application: a node of the swarm, and the trainer that it starts.

This package only wires things together. One uvloop in the main thread runs p2pd, the DHT, the protocol core's driver
(``p2ptrain.net``) and the owner's control; the training thread asks the trainer for inner steps and makes outer ones
(``p2ptrain.host.loop``).
"""
