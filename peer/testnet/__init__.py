"""A whole swarm on this machine: one bootstrap, some peers and a solo run to compare with, each its own process.

``p2ptrain testnet`` starts them all, shows their progress and ends when they do. It then averages the peers' models,
compares the average with the solo run (plain AdamW over as many tokens as one peer saw) and gives a verdict: a peer
that learned nothing, or that silently trained alone, fails the run.

=========  =========================================================================
command    ``p2ptrain testnet``: options in, exit status out
plan       the directory's layout: the run, its solo twin, the homes
processes  child processes, which end with the testnet
runner     start the processes, watch them, stop them
watch      progress from the children's event logs, and its live display
measure    the averaged model: held-out loss, disagreement, a sample of text (torch)
report     verdict, summary.json, the closing table (pure)
=========  =========================================================================
"""

from peer.testnet.command import testnet

__all__ = ["testnet"]
