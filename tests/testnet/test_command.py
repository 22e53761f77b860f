"""The command's mistakes, before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from p2ptrain.errors import UserError
from peer.testnet.command import testnet


def test_a_page_that_cannot_be_served_replaces_no_earlier_testnet(tmp_path: Path) -> None:
    earlier = tmp_path / "summary.json"
    earlier.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: Address already in use"):
            testnet(["--page", str(port), "--out", str(tmp_path)], standalone_mode=False)
    assert earlier.read_text() == "{}"
