"""Reasons why p2pd did not start, as its owner reads them."""

from __future__ import annotations

import socket

import pytest

from p2ptrain.base.errors import DeviceError
from p2ptrain.net.p2pd.daemon import _explained

REASON = "failed to listen on any addresses: listen tcp4 127.0.0.1:4001: bind: "


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (REASON + "address already in use", "127.0.0.1:4001 is in use by another program."),
        (REASON + "cannot assign requested address", "127.0.0.1:4001 is not an address of this machine."),
        (REASON + "permission denied", "Listening on 127.0.0.1:4001 is not permitted."),
        ("something else", "The libp2p daemon did not start (something else)."),
    ],
)
def test_its_last_words_are_explained(reason: str, said: str) -> None:
    assert _explained(reason, ["/ip4/127.0.0.1/tcp/4001"]).problem == said


def test_a_taken_port_is_found_out_where_it_said_nothing() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        there = "/ip4/127.0.0.1/tcp/" + place.rpartition(":")[2]
        assert _explained("", [there]).problem == f"{place} is in use by another program."
        assert isinstance(_explained("something else", [there]), DeviceError)
    assert isinstance(_explained("", [there]), DeviceError)
