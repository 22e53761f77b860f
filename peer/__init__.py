"""The peer application: one process that trains and is one node of the swarm.

This package only wires things together. The main thread runs torch (``p2ptrain.train.loop``), one network thread runs
uvloop with p2pd, the DHT and the protocol core's driver (``network``), and a small pool encodes and decodes. They
communicate through the learner's queue and ``Driver.post``; neither waits for the other.
"""
