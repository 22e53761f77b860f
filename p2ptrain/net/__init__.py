"""The network shell: everything that touches a socket, and the fakes that stand in for it.

================  ======================================================================================================
driver            performs the protocol core's effects and feeds back events; knows links only as ``ports.Link``
session           one conversation over one link
porter            declines politely while the peer is away
payload           bulk data over any link: chunks, lengths, digests
lanes             several streams for one large payload
together          talks at once, of which the first that fails ends the others
memory            links, transport and directory in memory; virtual_time: the clock that tests run them on
identity          the peer's Ed25519 key file; signs and verifies presence records
address           multiaddresses: which to announce, how to print them, how p2pd wants them
streams           a byte stream to p2pd that copies little
rates             the owner's caps: one line a direction, shared by all streams
socket_folder     private folders for Unix sockets, swept when their owner is gone
daemon            one p2pd child process: its sockets, its death, dialing and streams
dialing           which of the addresses that strangers announce we dial
node              one place in the network: the daemon, the DHT in this process, and the keeper that (re)joins the swarm
dht_protocol      hivemind's DHT protocol with limits: what a stranger's request may cost, and its answer do
dht               a DHT node with that protocol in it; hivemind's errors as NetworkError
links             ``ports.Link`` and ``ports.Transport`` over streams of the daemon
directory         ``ports.Directory`` over the DHT, the validator that every node runs, and the peer cache on disk
manifest_service  any node hands out the run's signed manifest
figures_service   a peer tells its own figures to who shows the swarm, if its owner agreed
================  ======================================================================================================

hivemind, whose import costs seconds and brings torch along, is met only in ``daemon``, ``control``, ``dht_protocol``,
``dht``, ``node``, ``directory`` and ``rulings``. That is why this package re-exports nothing: import from its modules,
and the fakes come without it.
"""

import os
import sys

if sys.platform == "linux":
    # hivemind would set "file_system" for the whole process: then the first tensor that the data library shares starts
    # a torch_shm_manager beside every peer.
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
