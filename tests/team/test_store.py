"""The store by which ranks on several computers meet: content, limits, waits, and gloo on top of it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from p2ptrain.base.errors import RemoteError, TeamError
from p2ptrain.team import store
from p2ptrain.team.connection import RankConnection, SocketLine
from p2ptrain.team.sealed import accept_rank
from p2ptrain.team.store import LeaderStore, RankStore, StoreContent, StoreRequest, serve_store
from p2ptrain.train.team_group import is_connection_failure

HERE = Path(__file__).parent


@pytest.fixture
def both():
    """Return the leader's store and another rank's, with one content."""
    ours, theirs = socket.socketpair()
    content = StoreContent(most_wait_s=0.3)
    server = threading.Thread(target=serve_store, args=(content, RankConnection(SocketLine(ours), 1 << 17)))
    server.start()
    remote = RankStore(RankConnection(SocketLine(theirs), 1 << 16), 5.0)
    yield LeaderStore(content), remote, content
    remote.close()
    server.join()


def test_all_ranks_see_one_content(both) -> None:
    leader, remote, _ = both
    remote.set("a", b"1")
    assert leader.get("a") == b"1"
    assert [remote.add("n", 2), leader.add("n", 3)] == [2, 5]
    assert remote.check(["a", "n"])
    assert not remote.check(["a", "b"])
    assert [remote.compare_set("a", "1", "2"), leader.compare_set("a", "1", "3")] == [b"2", b"2"]
    assert remote.num_keys() == 2
    assert remote.delete_key("a")
    assert not remote.delete_key("a")
    within = dist.PrefixStore("part", remote)
    within.set("x", b"y")
    assert leader.get("part/x") == b"y"


def test_a_wait_ends_with_the_key_or_after_the_stores_own_limit(both) -> None:
    leader, remote, _ = both
    threading.Timer(0.1, lambda: leader.set("late", b"v")).start()
    remote.wait(["late"], timedelta(seconds=3600))
    with pytest.raises(RuntimeError, match="did not come") as caught:
        remote.wait(["never"], timedelta(seconds=3600))
    assert is_connection_failure(caught.value)


def test_the_end_of_a_generation_ends_all_waits(both) -> None:
    _, remote, content = both
    content.most_wait_s = 60.0
    threading.Timer(0.1, content.close).start()
    with pytest.raises(RuntimeError, match="has ended"):
        remote.wait(["never"], timedelta(seconds=50))


def test_the_end_of_the_line_is_an_error(both) -> None:
    _, remote, _ = both
    remote.close()
    with pytest.raises(TeamError, match="rendezvous"):
        remote.get("a")


def test_values_and_keys_beyond_the_limits_are_refused(both, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, remote, content = both
    with pytest.raises(RemoteError, match="limits"):
        leader.set("long", bytes(store.MOST_VALUE_BYTES + 1))
    monkeypatch.setattr(store, "MOST_KEYS", 2)
    leader.set("a", b"")
    leader.set("b", b"")
    leader.set("b", b"again")
    with pytest.raises(RemoteError, match="keys"):
        leader.set("c", b"")
    with pytest.raises(RemoteError, match="not a number"):
        leader.add("b", 1)
    monkeypatch.setattr(store, "MOST_STORED_BYTES", 8)
    with pytest.raises(RemoteError, match="limits"):
        leader.set("a", bytes(9))
    with pytest.raises(TeamError):  # the server ends the line of a rank that does so
        remote.set("c", b"")
    assert content.answered(StoreRequest(op="count"), [])[0].number == 2


def test_ranks_on_a_lan_meet_in_each_generation_and_pickle_nothing() -> None:
    size, key = 3, secrets.token_bytes(32)
    contents = {bytes([generation]) * 16: StoreContent(20.0) for generation in (1, 2)}
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            hello, line = accept_rank(listener.accept()[0], lambda hello: key)
            serve_store(contents[hello.generation], RankConnection(line, 1 << 17))

        threads = [threading.Thread(target=serve) for _ in range(2 * size)]
        for each in threads:
            each.start()
        port = str(listener.getsockname()[1])
        paths = os.pathsep.join([str(HERE.parent / "train"), os.environ.get("PYTHONPATH", "")])
        ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "store_rank.py"), port, key.hex(), str(rank), str(size)],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": paths},
                text=True,
            )
            for rank in range(size)
        ]
        said = [each.communicate(timeout=120)[0].split() for each in ranks]
        for each in threads:
            each.join(10)
    assert said == [["6", "9", "4"], ["6", "9", "2"], ["6", "9", "4"]]
