"""What a tokenizer loses of a text is counted, and told or refused."""

import contextlib
import hashlib
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from p2ptrain.base.errors import CorpusError, ManifestError
from p2ptrain.data import corpus, stream
from p2ptrain.data.corpus import check_vocabulary, open_corpus
from p2ptrain.data.sources import InterruptedCorpusError, TextChunk
from p2ptrain.data.tokenizer import JsonTokenizer

WORDS = {"[UNK]": 0, "the": 1, "cat": 2}


def words(separator: bool = True) -> Tokenizer:
    made = Tokenizer(models.WordLevel(WORDS | ({"</s>": 3} if separator else {}), unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.fixture
def warnings(manifest_with, tmp_path):
    """``warnings(tokenizer, text)``: what is said, whether the stream is built or cached."""

    def build(made: Tokenizer, text: str, form: str = "text", vocabulary: int = 512) -> list[str]:
        data, file = tmp_path / "data", tmp_path / "tokenizer.json"
        data.write_text(text)
        made.save(str(file))
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (data, file)]
        manifest = manifest_with(
            {"kind": "file", "sha256": digests[0], "format": form}, {"kind": "file", "sha256": digests[1]}
        )
        model = manifest.model.model_copy(
            update={"config": manifest.model.config.model_copy(update={"vocab_size": vocabulary})}
        )
        manifest = manifest.model_copy(update={"model": model})
        first: list[str] = []
        later: list[str] = []
        for said in (first, later):
            open_corpus(manifest, tmp_path / "cache", data, file, warn=said.append)
        assert later == first
        return first

    return build


def test_a_lossless_tokenizer_needs_no_word(warnings):
    assert warnings(byte_level(), "The cat, für alle.\n\n\tx  y\n" * 50) == []


def test_unknown_tokens_are_a_number(warnings):
    said = warnings(words(), "the cat dog cat\n" * 100)
    assert said[0].startswith("25.0 % of the tokens are the unknown token")


def test_a_text_that_is_mostly_unknown_is_refused(warnings, tmp_path):
    with pytest.raises(CorpusError, match="100 % of the tokens are the unknown one"):
        warnings(words(), "один два три\n" * 100)
    assert not list((tmp_path / "cache").glob("*.npy"))


KNOWN, UNKNOWN = "the cat " * 300, "один два " * 300


@pytest.mark.parametrize(
    ("documents", "stops_at", "share"),
    [([UNKNOWN] * 10, [], 1.0), ([KNOWN] * 10 + [UNKNOWN], [10], 1 / 11), ([KNOWN] + [UNKNOWN] * 9, [3, 9], 0.9)],
)
def test_a_text_that_is_continued_is_judged_as_a_whole(
    manifest_with, tmp_path, monkeypatch, documents, stops_at, share
):
    """Whatever of it the last start reads; a refusal is repeated by the next start."""
    made = words()
    stops = [*stops_at]

    def read_pieces(spec, data, counts, position):
        for number in range(position or 0, len(documents)):
            if stops and number >= stops[0]:
                stops.pop(0)
                raise InterruptedCorpusError("The hub stops.", "Start again.")
            yield TextChunk(documents[number], True, number + 1)

    monkeypatch.setattr(corpus, "read_pieces", read_pieces)
    monkeypatch.setattr(corpus, "tokenizer_of", lambda *_: JsonTokenizer(made, 0))
    monkeypatch.setattr(stream, "PIECE_CHARACTERS", 100)
    manifest = manifest_with({"kind": "hub", "name": "some/texts", "revision": "0" * 40})
    reported, said = [], []

    def start():
        open_corpus(manifest, tmp_path, report=lambda *found: reported.append(found), warn=said.append)

    for _ in range(len(stops)):
        with contextlib.suppress(InterruptedCorpusError):
            start()
    if share > 0.5:
        for _ in range(2):
            with pytest.raises(CorpusError, match=f"{100 * share:.0f} % of the tokens are the unknown one"):
                start()
            assert not list(tmp_path.glob("*.resume"))
    else:
        start()
        [(counts, _)] = reported
        assert (counts.documents, counts.text_bytes) == (len(documents), len("".join(documents).encode()))
        assert any(sentence.startswith(f"{100 * share:.1f} % of the tokens") for sentence in said)


def test_a_lossy_normalizer_is_shown_by_an_example(warnings):
    made = byte_level()
    made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    [said] = warnings(made, "Für Élise\nplain\n" * 50)
    assert "50 of the first 50 pairs of lines do not come back" in said
    assert said.endswith(r"'Für Élise\nplain' becomes 'fur elise\nplain'")


def test_lost_line_ends_are_shown(warnings):
    [said] = warnings(words(), "the cat\nthe cat\n" * 50)
    assert r"'the cat\nthe cat' becomes 'the cat the cat'" in said


def test_documents_without_a_separator_are_counted(warnings):
    rows = '{"text": "the cat the cat the cat the cat"}\n' * 60
    assert warnings(words(separator=False), rows, "jsonl") == [
        "the tokenizer has no token that separates documents, so 60 documents follow each other without a mark"
    ]
    assert warnings(words(), rows, "jsonl") == []


def test_more_ids_than_the_model_has_are_refused_before_the_text_is_read(warnings, tmp_path):
    with pytest.raises(ManifestError, match="The tokenizer has 256 ids, but the model has only 255"):
        warnings(byte_level(), "the cat", vocabulary=255)
    assert not (tmp_path / "cache").exists()
    manifest = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=1999), init=None))
    with pytest.raises(ManifestError, match="The tokenizer has 2,000 ids, but the model has only 1,999") as caught:
        check_vocabulary(manifest, SimpleNamespace(vocabulary_size=2000))
    assert "vocab_size to 2000 before" in caught.value.remedy  # as it is written in the file
