"""Text becomes ids: documents between prefix and separator."""

from p2ptrain.data.stream import Cut, encode_documents
from p2ptrain.data.tokenizer import ByteTokenizer


def test_each_document_is_between_prefix_and_separator(monkeypatch):
    pieces = [
        Cut("", "ab", True, False),
        Cut("ab", "c", False, True),
        Cut("", "", True, True),
        Cut("", "d", True, False),
    ]
    monkeypatch.setattr(ByteTokenizer, "prefix", (1, 2))
    assert bytes(b"".join(bytes(ids.tolist()) for ids in encode_documents(pieces, ByteTokenizer()))) == (
        b"\1\2abc\0\1\2\0\1\2d"
    )
