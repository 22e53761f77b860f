"""torch's static rendezvous, with a store that listens on one address alone, for the computers of one owner.

torch's own handlers listen on all addresses, and its ``c10d`` reads pickles from its store. Anyone who reaches this
store can disturb training: the network between the computers must be trusted, as torch asks. Waits for another computer
last until this process ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

import p2ptrain
from p2ptrain.base.errors import DeviceError
from p2ptrain.base.text import one_line
from peer.training.lan_address import LanAddress, interface_of

BACKEND = "p2ptrain"
MOST_NODES = 256
POLL_S = 0.2
DIAL_S = 5.0
BEAT_S, SILENT = 2.0, 15
"""Seconds between two signs of life of each computer, and missing ones in a row after which it counts as lost: its
connections may stay open. Guess: how long a computer that swaps is silent."""
STORE = timedelta(seconds=60)
"""Longest wait for an answer of the store: of a computer that swaps."""


RELEASE = f"p2ptrain {p2ptrain.__version__} with torch {'.'.join(torch.__version__.split('.')[:2])}"
"""What all computers of a team have installed."""


class Rendezvous(RendezvousHandler):
    """Meeting of the launchers of a team.

    Args:
        host, port: where the leader listens; port 0: any.
        node: number of this computer; 0: the leader.
        nodes: computers, which the leader alone knows.
    """

    def __init__(self, host: str, port: int, node: int, nodes: int) -> None:
        self._host, self._port, self._node, self._nodes = host, port, node, nodes

    @classmethod
    def of(cls, parameters: RendezvousParameters) -> Rendezvous:
        """Return the handler that torch's launcher asks for."""
        host, _, port = parameters.endpoint.rpartition(":")
        return cls(host, int(port), int(parameters.config["node"]), parameters.max_nodes)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other computers. Raises RendezvousConnectionError, and DeviceError if this one does not fit."""
        try:
            store = self._led() if self._node == 0 else self._joined()
            if self._nodes > 1:
                self._keep_in_touch()
        except (DistError, OSError) as error:
            raise RendezvousConnectionError(str(error)) from error
        place = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(PrefixStore("launchers", store), self._node, self._nodes, place)

    def _led(self) -> TCPStore:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._host, self._port))
        listener.listen()
        self._port = int(listener.getsockname()[1])
        store = TCPStore(
            self._host,
            self._port,
            is_master=True,
            timeout=STORE,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store.set("team", f"{self._nodes} {RELEASE}")
        others = [_key(node) for node in range(1, self._nodes)]
        while others and not store.check(others):
            time.sleep(POLL_S)
        store.set("begun", "")
        return store

    def _joined(self) -> TCPStore:
        while not self._answers():
            time.sleep(POLL_S)
        store = TCPStore(self._host, self._port, is_master=False, timeout=STORE, wait_for_workers=False)
        self._nodes = _nodes_of(store)
        if self._node >= self._nodes:
            raise DeviceError(
                f"The team has {self._nodes} computers, so that none has the number {self._node}.",
                f"Give --number from 1 to {self._nodes - 1}, each to one computer.",
            )
        if store.check(["begun"]):
            raise RendezvousConnectionError("the team trains already")
        token = secrets.token_hex(16)
        store.set(_key(self._node), token)
        while not store.check(["begun"]):
            time.sleep(POLL_S)
        if store.get(_key(self._node)) != token.encode():
            raise DeviceError(
                f"Another computer has joined the team with the number {self._node}, too.",
                "Give each computer a --number of its own.",
            )
        return store

    def _answers(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), DIAL_S).close()
        except OSError:
            return False
        return True

    def _keep_in_touch(self) -> None:
        """Show the others that this computer lives, and end this process where one of them is lost."""
        store = TCPStore(self._host, self._port, is_master=False, timeout=STORE, wait_for_workers=False)
        missing = dict.fromkeys(range(1, self._nodes) if self._node == 0 else (0,), 0)
        counts = dict.fromkeys(missing, 0)

        def beat() -> None:
            with contextlib.suppress(DistError):  # the leader has ended
                while True:
                    store.add(f"beat {self._node}", 1)
                    for node, before in counts.items():
                        if (now := store.add(f"beat {node}", 0)) != before:
                            counts[node], missing[node] = now, 0
                    time.sleep(BEAT_S)

        def watch() -> None:
            while max(missing.values()) < SILENT:
                time.sleep(BEAT_S)
                for node in missing:  # counted, since this process may be stopped, too
                    missing[node] += 1
            lost = max(missing, key=missing.__getitem__)
            who = f"computer {lost}" if lost else "the leader"
            sys.stderr.write(f"[team] {who} has been silent for {SILENT * BEAT_S:.0f} s\n")
            os._exit(1)

        for each in (beat, watch):
            threading.Thread(target=each, name=each.__name__, daemon=True).start()

    # --- the rest of torch's interface --------------------------------------------------------------------------------

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def own_interface(leader: LanAddress) -> str:
    """Return the name of this computer's interface towards the leader, by which gloo and NCCL reach it.

    Waits until there is a way to it.
    """
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((leader.host, leader.port))
            return interface_of(probe.getsockname()[0])
        time.sleep(DIAL_S)


def _key(node: int) -> str:
    return f"node {node}"


def _nodes_of(store: TCPStore) -> int:
    """Return how many computers the leader waits for. Raises DeviceError if it is no leader or another release."""
    nodes, _, release = store.get("team").decode(errors="replace").partition(" ")
    if release != RELEASE or not nodes.isascii() or not nodes.isdigit() or not 0 < int(nodes) <= MOST_NODES:
        raise DeviceError(
            f"The leader has {one_line(release, 80)}, and this computer {RELEASE}.",
            "Install the same on all computers.",
        )
    return int(nodes)
