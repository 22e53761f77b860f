"""The peer application: one process that trains and is one node of the swarm.

This package only wires things together. The main thread runs torch (``p2ptrain.train.loop``), one network thread runs
uvloop with p2pd, the DHT and the protocol core's driver (``network``), and a small pool encodes and decodes. They
communicate through the learner's queue and ``Driver.post``; neither waits for the other.

================  =====================================================================================================
cli               ``p2ptrain peer``, ``invite``, ``admit``, ``revoke``, ``contributions``, ``export``, ``generate``
home              a peer's directory: lock, identity, manifest, checkpoints
app               runs one peer from start to end
assembly          builds model, data, learner and protocol core, and resumes from a checkpoint
stopping          Ctrl+C, SIGTERM and SIGHUP
capacity          checks that the model fits this machine's memory
network           the connection, which survives the death of p2pd
network_thread    the thread that runs the event loop
manifest_fetch    fetches the run's manifest from the addresses of a join link
admission_client  joins a run that does not admit everybody
ledger            receipts on disk
contributions     asks partners to sign receipts
participation     whether the peer is in the swarm, trains alone or is paused
owner             the owner's control: settings, monthly traffic, ``p2ptrain status``, ``pause``, ``resume``, ``finish``
doctor            ``p2ptrain doctor``: checks of this machine and its network
paths             whether links are direct or relayed
session_recorder  progress notes, checkpoints and summary.json of one session
throughput        tokens per second
state             one view of this peer for its page, metrics and bootstraps
sharing           serves that view: the page, and figures for bootstraps
messages          notes as lines for people
screen            a progress bar on a terminal, tagged lines elsewhere
options           number types for the command line
model             a home's model without a swarm: export, generate
testnet           a whole swarm on this machine
================  =====================================================================================================
"""
