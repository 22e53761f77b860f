"""Cache of token streams: built once, complete or rebuilt, bounded, locked."""

import errno
import os
import threading

import numpy as np
import pytest
from filelock import FileLock

from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.data.sources import TextChunk
from p2ptrain.data.stream import Unfinished, open_stream, token_type, tokenize
from p2ptrain.data.tokenizer import ByteTokenizer

IDS = np.arange(100, dtype=np.uint8)


def builder(calls: list[int]):
    def build(_):
        calls.append(1)
        yield IDS[:60]
        yield IDS[60:]

    return build


def test_a_stream_is_built_once(tmp_path):
    calls: list[int] = []
    for _ in range(2):
        tokens = open_stream(tmp_path, "key", 256, builder(calls))
        assert np.array_equal(tokens, IDS)
        assert isinstance(tokens, np.memmap)
        assert not tokens.flags.writeable
    assert len(calls) == 1


@pytest.mark.parametrize("kept_bytes", [0, 5, 64, 127, 128, 150, 227])
def test_a_torn_stream_is_built_again(tmp_path, kept_bytes):
    calls: list[int] = []
    open_stream(tmp_path, "key", 256, builder(calls))
    os.truncate(tmp_path / "key.npy", kept_bytes)
    assert np.array_equal(open_stream(tmp_path, "key", 256, builder(calls)), IDS)
    assert len(calls) == 2


def test_a_stream_of_another_type_is_built_again(tmp_path):
    np.save(tmp_path / "key.npy", np.array([["pickled"]], dtype=object), allow_pickle=True)
    assert np.array_equal(open_stream(tmp_path, "key", 256, builder([])), IDS)


def test_nothing_is_left_of_a_build_that_failed(tmp_path):
    def build(_):
        yield IDS
        raise CorpusError("the line went dead", "try again")

    with pytest.raises(CorpusError):
        open_stream(tmp_path, "key", 256, build)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


def test_a_full_disk_is_the_homes_fault(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HomeError, match="No space left") as caught:
        open_stream(tmp_path, "key", 256, builder([]))
    assert "space" in caught.value.remedy
    assert "XDG_CACHE_HOME" in caught.value.remedy
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


def test_an_empty_stream_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="empty"):
        open_stream(tmp_path, "key", 256, lambda _: iter([IDS[:0]]))


def test_two_peers_do_not_build_twice(tmp_path):
    calls: list[int] = []
    opened: list[np.ndarray] = []
    waiting = threading.Thread(target=lambda: opened.append(open_stream(tmp_path, "key", 256, builder(calls))))
    with FileLock(tmp_path / "key.lock"):
        waiting.start()
        np.save(tmp_path / "other.npy", IDS)
        (tmp_path / "other.npy").rename(tmp_path / "key.npy")  # what the peer that holds the lock would write
    waiting.join(timeout=30)
    assert np.array_equal(opened[0], IDS)
    assert not calls


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(2, "u1"), (256, "u1"), (257, "u2"), (65_536, "u2"), (65_537, "u4"), (262_144, "u4")],
)
def test_ids_take_the_narrowest_type(vocabulary, dtype):
    assert token_type(vocabulary) == np.dtype(dtype)


def test_separators_follow_documents_and_the_limit_holds():
    pieces = [TextChunk("ab", False), TextChunk("c", True), TextChunk("de", True)]
    whole = b"abc\0de\0"
    for limit in range(1, 9):
        chunks = list(tokenize(pieces, ByteTokenizer(), limit))
        assert b"".join(bytes(chunk.ids) for chunk in chunks) == whole[:limit]
        assert sum(chunk.text_bytes for chunk in chunks) <= len(whole[:limit].replace(b"\0", b""))
    chunks = list(tokenize(pieces, ByteTokenizer(), None))
    assert b"".join(bytes(chunk.ids) for chunk in chunks) == whole
    assert sum(chunk.text_bytes for chunk in chunks) == 5


def test_each_document_begins_with_the_prefix_once():
    pieces = [TextChunk("ab", False), TextChunk("c", True), TextChunk("", True), TextChunk("d", False)]
    whole = b"\1\2abc\0\1\2\0\1\2d"
    for limit in (*range(1, 13), None):
        chunks = list(tokenize(pieces, ByteTokenizer(), limit, (1, 2)))
        assert b"".join(bytes(chunk.ids) for chunk in chunks) == whole[:limit]


def continued(seen: list[object], stops: bool, forgets: bool = False):
    """A source that saves its position after every ten ids, and may end in an error after 35 of them."""

    def build(unfinished: Unfinished):
        seen.append((unfinished.tokens, unfinished.position))
        for start in range((unfinished.position or {"at": 0})["at"], 100, 10):
            if stops and start == 30:
                yield IDS[30:35]
                if forgets:
                    unfinished.forget()
                raise CorpusError("The server sends no more.", "Try again.")
            yield IDS[start : start + 10]
            unfinished.save({"at": start + 10})

    return build


@pytest.mark.parametrize("dtype_ids", [256, 70_000])
def test_a_stream_is_continued_where_its_source_was(tmp_path, dtype_ids):
    seen: list[object] = []
    for stops in (True, True, False):
        try:
            tokens = open_stream(tmp_path, "key", dtype_ids, continued(seen, stops))
        except CorpusError:
            assert {path.suffix for path in tmp_path.iterdir()} == {".lock", ".part", ".resume"}
    assert seen == [(0, None), (30, {"at": 30}), (30, {"at": 30})]
    assert np.array_equal(tokens, IDS)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock", ".npy"}


def test_a_stream_whose_position_does_not_hold_begins_anew(tmp_path):
    def spoil_note():
        (tmp_path / "key.resume").write_bytes(b"{")

    def cut_file():
        os.truncate(tmp_path / "key.part", 140)

    for spoil in (spoil_note, cut_file):
        with pytest.raises(CorpusError):
            open_stream(tmp_path, "key", 256, continued([], True))
        spoil()
        seen: list[object] = []
        assert np.array_equal(open_stream(tmp_path, "key", 256, continued(seen, False)), IDS)
        assert seen == [(0, None)]
        (tmp_path / "key.npy").unlink()


def test_a_stream_that_its_source_gives_up_leaves_nothing(tmp_path):
    with pytest.raises(CorpusError):
        open_stream(tmp_path, "key", 256, continued([], True, forgets=True))
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
