"""The peer application: one process that trains, and is one node of the swarm.

Wiring only. The main thread is torch's (``p2ptrain.train.loop``), one network thread runs uvloop with p2pd, the DHT and
the protocol core's driver (``network``), a small pool encodes and decodes. They meet in the learner's queue and in
``Driver.post``; neither waits for the other.

==========  ===========================================================================================================
cli         ``p2ptrain peer``, ``invite``, ``admit``, ``revoke``, ``contributions``, ``export``, ``generate``
home        the directory that a peer lives in: lock, identity, manifest, checkpoints
app         runs everything, in order
building    model, data, learner and protocol core, resumed where a checkpoint is
stopping    Ctrl+C and SIGTERM
fit         whether this machine can hold the model
network     the network thread, and the connection that survives the death of p2pd
entrance    how it gets into a run that does not take everybody
ledger      receipts of what it did on disk; ``contributions`` has partners sign them
attendance  whether it is in the swarm just now, alone or resting
owner       the owner's hand: settings, the month's traffic, ``p2ptrain status``, ``pause``, ``resume``, ``finish``
paths       whether links go directly or through a relay
record      what is written down: progress notes, checkpoints, summary.json
state       one view of this peer for whoever looks; ``showing`` lets them: its page, its figures for bootstraps
lines       notes as lines for people
screen      a progress bar on a terminal, tagged lines elsewhere
model       a home's model without a swarm: export, generate
testnet     a whole swarm on this machine
==========  ===========================================================================================================
"""
