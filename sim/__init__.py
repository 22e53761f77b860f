"""Simulation of whole swarms on a virtual clock, with the same two cores as the real peer.

The simulator holds no algorithm of its own: with the same seed it ends bitwise equal to the asyncio driver
(``tests/net/test_flagship.py``).
"""
