"""The peer application: a node of the swarm, and the trainer that it starts.

This package only wires things together. The main thread lets the trainer make inner steps and makes outer ones
(``p2ptrain.host.loop``), one network thread runs uvloop with p2pd, the DHT and the protocol core's driver
(``network``), and a small pool encodes and decodes. They communicate through the learner's queue and ``Driver.post``;
neither waits for the other.
"""
