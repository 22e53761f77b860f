"""One rank that meets the others through the leader's store: ``python store_rank.py PORT KEY RANK SIZE``.

It writes a sum over all ranks for each of two generations, and one over a group of ranks. Nothing may be pickled.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from team_rank import forbid_pickles

from p2ptrain.team.connection import RankConnection
from p2ptrain.team.lan_address import interface_of
from p2ptrain.team.sealed import Hello, Purpose, dial_leader
from p2ptrain.team.store import MOST_VALUE_BYTES, RankStore
from p2ptrain.train.team_group import Rendezvous, TeamGroup

if __name__ == "__main__":
    port, key, rank, size = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    forbid_pickles()
    for generation in (1, 2):
        hello = Hello(Purpose.STORE, rank, bytes([generation]) * 16)
        store = RankStore(RankConnection(dial_leader("127.0.0.1", port, key, hello), MOST_VALUE_BYTES), 20.0)
        place = Rendezvous(Path(), rank, size, generation, store, interface_of("127.0.0.1"))
        group = TeamGroup(place, 20.0)
        sys.stdout.write(f"{int(group.sum('sum', torch.tensor([rank + generation])))}\n")
        if generation == 2:
            part = dist.new_group([0, size - 1], timeout=timedelta(seconds=20), backend="gloo")
            values = torch.tensor([rank + 1])
            if rank in (0, size - 1):
                dist.all_reduce(values, group=part)
            sys.stdout.write(f"{int(values)}\n")
            del part
        group.close()
        store.close()
