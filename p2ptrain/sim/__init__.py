"""Simulation of whole swarms on a virtual clock, with the same two cores as the real peer.

``World`` is the clock and its event queue. ``SimulatedNetwork``, ``SimulatedPeer`` and the links perform the protocol
core's effects. ``QuadraticTask`` is the cheapest inner task. The simulator holds no algorithm of its own: with the same
seed it ends bitwise equal to the asyncio driver (``tests/net/test_flagship.py``).
"""

from p2ptrain.sim.learners import QuadraticTask
from p2ptrain.sim.network import Conditions, SimulatedNetwork
from p2ptrain.sim.peer import SimulatedPeer
from p2ptrain.sim.world import World

__all__ = ["Conditions", "QuadraticTask", "SimulatedNetwork", "SimulatedPeer", "World"]
