"""Network shell: everything that touches a socket, and the fakes that replace it in tests.

=================  =====================================================================================================
driver             performs the protocol core's effects and returns events; knows links only as ``ports.Link``
session            one conversation over one link
gate               checks membership certificates at the beginning of each link
porter             declines inbound offers while the peer is away
payload            bulk data over any link: chunks, lengths, digests
parallel_streams   several streams for one large payload
weight_server      serves this peer's weights to newcomers
weight_download    downloads a model from several donors and compares their copies
concurrently       runs awaitables concurrently; the first failure cancels the others
memory             links, transport and directory in memory
virtual_time       the event loop that tests run ``memory`` on
identity           the peer's Ed25519 key file; signs and verifies presence records
address            multiaddresses: which to announce, how to print them, p2pd's binary form
node               one node of the network: p2pd, the DHT, and the task that joins and rejoins the swarm
dht_protocol       hivemind's DHT protocol with limits on requests and answers
dht                a DHT node with that protocol; turns hivemind's errors into NetworkError
directory          ``ports.Directory`` over the DHT, the record validator, and the peer cache on disk
access_list_store  keeps the run's newest access list in the DHT
links              ``ports.Link`` over a stream of p2pd
transport          ``ports.Transport`` over p2pd
throttle           the owner's caps: one throttle per direction, shared by all streams
rate_limiter       token buckets by peer and overall
allowance          sliding-window limits by peer, origin and overall
rpc                lists of plain values as frames, for the small services below
admission_service  serves the access list; an invite issuer also signs certificates
manifest_service   serves the run's signed manifest
figures_service    sends this peer's figures to monitors, if its owner agreed
receipt_service    countersigns partners' receipts
p2pd               the p2pd child process: its sockets, streams and dialing policy
relay              relays, reservations and reachability
=================  =====================================================================================================

Only ``p2pd.daemon``, ``p2pd.control``, ``p2pd.unary``, ``dht_protocol``, ``dht``, ``node``, ``directory`` and
``access_list_store`` import hivemind, which takes seconds and imports torch. Therefore this package re-exports nothing:
import its modules, and the fakes load without hivemind.
"""

import os
import sys

if sys.platform == "linux":
    # hivemind sets "file_system" for the whole process by default: the first tensor that the data library shares would
    # start a torch_shm_manager process for every peer.
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
