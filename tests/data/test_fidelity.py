"""What a tokenizer loses of a text is counted, and told or refused."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from p2ptrain.base.errors import CorpusError, ManifestError
from p2ptrain.data.checking import check_vocabulary
from tests.data.building import build

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
def warnings(tmp_path):
    """``warnings(tokenizer, text)``: what is said of the text."""

    def said(made: Tokenizer, text: str, form: str = "txt", **wanted: object) -> list[str]:
        data, file = tmp_path / f"data.{form}", tmp_path / "tokenizer.json"
        data.write_text(text)
        made.save(str(file))
        return build(tmp_path / "run", data, tokenizer=file, **wanted).summary.warnings

    return said


def test_a_lossless_tokenizer_needs_no_word(warnings):
    assert warnings(byte_level(), "The cat, für alle.\n\n\tx  y\n" * 50) == []


def test_unknown_tokens_are_a_number(warnings):
    said = warnings(words(), "the cat dog cat\n" * 100)
    assert said[0].startswith("25.0 % of the tokens are the unknown token")


def test_a_text_that_is_mostly_unknown_is_refused(warnings, tmp_path):
    with pytest.raises(CorpusError, match="100 % of the tokens are the unknown one"):
        warnings(words(), "один два три\n" * 100)
    assert not (tmp_path / "run").exists()


def test_a_lossy_normalizer_is_shown_by_an_example(warnings):
    made = byte_level()
    made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    [said] = warnings(made, "Für Élise\nplain\n" * 50)
    assert "51 of the first 51 pairs of lines do not come back" in said
    assert said.endswith(r"'Für Élise\nplain' becomes 'fur elise\nplain'")


def test_lost_line_ends_are_shown(warnings):
    [said] = warnings(words(), "the cat\nthe cat\n" * 50)
    assert r"'the cat\nthe cat' becomes 'the cat the cat'" in said


def test_documents_without_a_separator_are_counted(warnings):
    rows = '{"text": "the cat the cat the cat the cat"}\n' * 60
    assert warnings(words(separator=False), rows, "jsonl") == [
        "the tokenizer has no token that separates documents, so 60 documents follow each other without a mark"
    ]


def test_more_ids_than_the_model_has_are_refused():
    manifest = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=1999), init=None))
    with pytest.raises(ManifestError, match="The tokenizer has 2,000 ids, but the model has only 1,999") as caught:
        check_vocabulary(manifest, SimpleNamespace(vocabulary_size=2000))
    assert "vocab_size to 2000 before" in caught.value.remedy  # as it is written in the file
