"""A whole swarm on this machine: one bootstrap, some peers and a solo run to compare with, each its own process.

``p2ptrain testnet`` starts them all at once, shows how they get on, and ends by itself when they do. Then it averages
the peers' models, measures the average against the solo run (plain AdamW over as many tokens as one peer saw) and says
in plain words whether this was a swarm: a peer that learned nothing, or that silently trained alone, fails the run.

=========  ==========================================================================================
command    ``p2ptrain testnet``: options in, exit status out
plan       what lies where: the run, its solo twin, the homes
processes  children that die with us
conduct    start, watch, stop: from the first process to the last
watch      what the children's event logs say, and the live display of it
measure    the averaged model: held-out loss, disagreement, a sample of text (torch)
report     verdict, summary.json, the closing table (pure)
=========  ==========================================================================================
"""

from peer.testnet.command import testnet

__all__ = ["testnet"]
