"""Records of finished peers that a bootstrap keeps over restarts of p2pd and of itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bootstrap import finished_peers
from bootstrap.finished_peers import FinishedPeers, Records
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.net.directory import MAX_FINISHED


class Shelf:
    """DHT of one node, which forgets everything at a restart and answers at most ``answers`` times."""

    def __init__(self, answers: int = 3) -> None:
        self.held: Records = {}
        self.answers = answers

    async def sealed_finished(self) -> Records:
        self.answers -= 1
        if self.answers < 0:
            raise TimeoutError
        if self.answers == 1:
            raise NetworkError("no answer")
        return dict(self.held)

    async def keep_sealed(self, records: Records) -> None:
        for peer, record in records.items():
            if len(self.held) < MAX_FINISHED:
                self.held[peer] = record


def keep(path: Path, shelf: Any) -> list[str]:
    said: list[str] = []
    with pytest.raises(TimeoutError):
        asyncio.run(FinishedPeers(path, lambda _, text: said.append(text)).keep(shelf))
    return said


def test_what_the_node_forgets_is_stored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_peers, "KEEP_EVERY_S", 0.0)
    path = tmp_path / "finished.json"
    first, second = Shelf(), Shelf()
    first.held[PeerId("fox")] = b"sealed", 5e9
    assert keep(path, first) == []
    assert keep(path, second) == []
    assert second.held == first.held


def test_expired_records_are_not_stored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_peers, "KEEP_EVERY_S", 0.0)
    path, shelf = tmp_path / "finished.json", Shelf()
    path.write_text('[["fox", "00", 1.0], ["owl", "01", 5e9]]')
    keep(path, shelf)
    assert shelf.held == {PeerId("owl"): (b"\x01", 5e9)}


def test_later_records_displace_no_saved_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_peers, "KEEP_EVERY_S", 0.0)
    path, shelf, again = tmp_path / "finished.json", Shelf(), Shelf()
    path.write_text('[["fox", "00", 5e9]]')
    shelf.held |= {PeerId(f"stranger {number}"): (b"sealed", 5e9) for number in range(MAX_FINISHED)}
    keep(path, shelf)
    keep(path, again)
    assert len(again.held) == MAX_FINISHED
    assert PeerId("fox") in again.held


def test_a_damaged_file_counts_as_empty_and_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_peers, "KEEP_EVERY_S", 0.0)
    path = tmp_path / "missing" / "finished.json"
    shelf = Shelf()
    shelf.held[PeerId("fox")] = b"sealed", 5e9
    assert keep(path, shelf) == ["the list of finished peers could not be saved: No such file or directory"]
    path = tmp_path / "finished.json"
    path.write_text('[["fox", "zz", 1]]')
    empty = Shelf()
    keep(path, empty)
    assert empty.held == {}
