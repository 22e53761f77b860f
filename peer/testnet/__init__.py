"""A whole swarm on this machine, each part its own process, and a solo run to compare with.

``p2ptrain testnet`` starts them all, shows their progress and ends when they do. It then averages the peers' models,
compares the average with the solo run (the inner optimizer alone, on as many tokens as one peer's share) and gives a
verdict: a peer that learned nothing, or that silently trained alone, fails the run.
"""

from peer.testnet.command import testnet

__all__ = ["testnet"]
