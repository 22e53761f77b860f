"""Text becomes ids: documents, separators and limits."""

from p2ptrain.data.stream import Cut, tokenize
from p2ptrain.data.tokenizer import ByteTokenizer


def test_separators_follow_documents_and_the_limit_holds():
    pieces = [Cut("", "ab", True, False), Cut("ab", "c", False, True), Cut("", "de", True, True)]
    whole = b"abc\0de\0"
    for limit in range(1, 9):
        chunks = list(tokenize(pieces, ByteTokenizer(), limit))
        assert b"".join(bytes(chunk.ids) for chunk in chunks) == whole[:limit]
        assert sum(chunk.text_bytes for chunk in chunks) <= len(whole[:limit].replace(b"\0", b""))
    chunks = list(tokenize(pieces, ByteTokenizer(), None))
    assert b"".join(bytes(chunk.ids) for chunk in chunks) == whole
    assert sum(chunk.text_bytes for chunk in chunks) == 5


def test_each_document_begins_with_the_prefix_once():
    pieces = [
        Cut("", "ab", True, False),
        Cut("ab", "c", False, True),
        Cut("", "", True, True),
        Cut("", "d", True, False),
    ]
    whole = b"\1\2abc\0\1\2\0\1\2d"
    for limit in (*range(1, 13), None):
        chunks = list(tokenize(pieces, ByteTokenizer(), limit, (1, 2)))
        assert b"".join(bytes(chunk.ids) for chunk in chunks) == whole[:limit]
