"""Everything a tokenizer.json holds beside its vocabulary: what is turned off, refused or kept."""

import hashlib
import json
import struct

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from p2ptrain.base.errors import CorpusError
from p2ptrain.data import reading, stream
from p2ptrain.data.author_text import find_source
from p2ptrain.data.tokenizer import BORDER_MARK, SPECIAL_MARK, JsonTokenizer, load_tokenizer
from p2ptrain.manifest.sources import FileTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz</>_|"
TEXT = "the cat sat on the mat\n" * 3


def byte_level() -> Tokenizer:
    """Byte-level BPE as GPT-2's, with a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate([*alphabet, "th", "the", "at", "Ġthe", "Ċ" * 2])}
    merges = [("t", "h"), ("th", "e"), ("a", "t"), ("Ġ", "the"), ("Ċ", "Ċ")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def metaspace_bpe() -> Tokenizer:
    """BPE with byte fallback and the normalizers of Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unigram() -> Tokenizer:
    """Unigram with a prefix space, as T5's, whose vocabulary holds its special tokens with the best score."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("\n", -6.0)]
    made = Tokenizer(models.Unigram([*pieces, *((letter, -5.0) for letter in LETTERS)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(["</s>", "<unk>"])
    return made


def words() -> Tokenizer:
    """A token per word; the separator is an ordinary entry of the vocabulary."""
    vocabulary = {"[UNK]": 0, "</s>": 1, "the": 2, "cat": 3, "sat": 4, "on": 5, "mat": 6}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


EVERY = pytest.mark.parametrize("make", [byte_level, metaspace_bpe, unigram, words])


@pytest.fixture
def load(tmp_path):
    """``load(tokenizer or outline)``: what a run gets from that file."""

    def load(made: Tokenizer | dict[str, object], has_prefix: bool = False) -> JsonTokenizer:
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(made) if isinstance(made, dict) else made.to_str(), encoding="utf-8")
        spec = FileTokenizer(kind="file", sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        return load_tokenizer(spec, path, has_prefix)

    return load


def ids(tokenizer: JsonTokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text])[0].tolist()


@EVERY
def test_truncation_padding_and_template_change_nothing(load, make, tmp_path):
    plain, dressed = make(), make()
    dressed.enable_truncation(4)
    dressed.enable_padding(length=512)
    dressed.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    expected = plain.encode(TEXT, add_special_tokens=False).ids
    loaded = load(dressed)
    assert ids(loaded, TEXT) == expected
    assert [len(each) for each in loaded.encode_batch([TEXT, ""])] == [len(expected), 0]
    loaded.save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["truncation"] is saved["padding"] is saved["post_processor"] is None


def test_a_saved_tokenizer_gives_the_ids_of_training_in_transformers(load, tmp_path):
    from transformers import AutoTokenizer

    dressed = unigram()
    dressed.enable_truncation(4)
    dressed.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    loaded = load(dressed)
    loaded.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"] == ids(loaded, TEXT)


def test_a_published_models_tokenizer_keeps_what_begins_a_text(load, tmp_path):
    from transformers import AutoTokenizer

    dressed = unigram()
    dressed.post_processor = processors.TemplateProcessing(
        single="</s> $A <unk>", pair="</s> $A $B", special_tokens=[("</s>", 1), ("<unk>", 0)]
    )
    plain, loaded = load(dressed), load(dressed, has_prefix=True)
    assert (plain.prefix, loaded.prefix) == ((), (1,))
    assert plain.bos_text == loaded.bos_text == "</s>"
    assert ids(loaded, TEXT) == ids(plain, TEXT) == dressed.encode(TEXT, add_special_tokens=False).ids
    loaded.save(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved(TEXT)["input_ids"] == [1, *ids(loaded, TEXT)]
    assert saved.bos_token == "</s>"


@pytest.mark.parametrize(
    ("ids", "why"), [([99_999], "an id that its vocabulary lacks"), ([1] * 5, "with 5 tokens, and at most 4 are read")]
)
def test_what_begins_a_text_is_checked(load, ids, why):
    """Check what the library does not: ids of a post-processor are those that the file says."""
    outline = json.loads(unigram().to_str())
    outline["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"x": {"id": "x", "ids": ids, "tokens": ["x"] * len(ids)}},
    }
    with pytest.raises(CorpusError, match=why):
        load(outline)


def test_dropout_is_off(load):
    made = byte_level()
    made.model.dropout = 0.9
    assert len({tuple(ids(load(made), TEXT)) for _ in range(5)}) == 1
    assert ids(load(made), TEXT) == ids(load(byte_level()), TEXT)


@EVERY
@pytest.mark.parametrize("text", ["the </s> cat", "</s>", "a<|endoftext|>b</s>c", "</s></s>"])
def test_a_document_cannot_forge_a_separator(load, make, text):
    loaded = load(make())
    assert loaded.separator is not None
    assert loaded.separator not in ids(loaded, text)


def test_a_separator_cannot_be_forged_inside_a_word(load):
    """Also where a longer token, or a normalizer, keeps the separator's text alone from being one."""
    pieces = [("<unk>", -10.0), ("</s>", -1.0), ("▁", -2.0), ("▁</s>", -0.5), *((letter, -3.0) for letter in LETTERS)]
    longer = Tokenizer(models.Unigram(pieces, unk_id=0))
    longer.pre_tokenizer = pre_tokenizers.Metaspace()
    longer.add_special_tokens(["</s>"])
    replaced = words()
    replaced.normalizer = normalizers.Sequence([normalizers.Replace("</s>", "x"), normalizers.Replace("@@", "</s>")])
    for made, text in ((longer, "a</s>"), (replaced, "a @@ a")):
        loaded = load(made)
        assert loaded.separator == 1
        assert 1 not in ids(loaded, text)


def test_the_literal_text_of_a_separator_survives(load):
    for make in byte_level, unigram, metaspace_bpe:
        loaded = load(make())
        assert loaded.decode(ids(loaded, "the </s> <|endoftext|> cat")).strip() == "the </s> <|endoftext|> cat"


def test_the_literal_text_of_a_byte_token_is_no_byte(load):
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -1.0) for byte in range(256))]
    made = Tokenizer(models.Unigram([*pieces, *((letter, -5.0) for letter in LETTERS)], unk_id=0, byte_fallback=True))
    loaded = load(made)
    assert loaded.unknown is None
    assert made.token_to_id("<0x0A>") not in ids(loaded, "a<0x0A>")
    assert made.token_to_id("<0x0A>") in ids(loaded, "a\n")


def test_an_ordinary_added_token_is_found_in_text_and_counts(load):
    made = byte_level()
    size = made.get_vocab_size()
    made.add_tokens(["photosynthesis", AddedToken("  ", normalized=False)])
    loaded = load(made)
    assert loaded.vocabulary_size == size + 2
    assert ids(loaded, "photosynthesis") == [size]
    assert size + 1 in ids(loaded, "a  b")


def test_a_special_token_is_preferred_as_separator(load):
    """In the vocabulary of Gemma "</s>" is an ordinary token, the HTML tag."""
    made = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    made.add_tokens(["</s>"])
    made.add_special_tokens(["<eos>"])
    assert load(made).separator == made.token_to_id("<eos>")


def test_the_separator_of_bert(load):
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "[SEP]": 1}, unk_token="[UNK]"))
    made.add_special_tokens(["[SEP]"])
    assert load(made).separator == 1


def test_an_id_that_the_library_does_not_give_is_refused(load):
    outline = json.loads(byte_level().to_str())
    outline["added_tokens"][0]["id"] = 5000
    with pytest.raises(CorpusError, match=r"<\|endoftext\|>' has the id 5000 in the file, but gets 261"):
        load(outline)


@pytest.mark.parametrize(
    "model",
    [
        models.BPE(vocab={"a": 0}, merges=[]),
        models.BPE(vocab={"a": 0}, merges=[], unk_token="<unk>"),
        models.BPE(vocab={"a": 0, "<0x00>": 1}, merges=[], byte_fallback=True),
        models.WordLevel({"a": 0}, unk_token="<unk>"),
        models.WordPiece({"a": 0}, unk_token="[UNK]"),
        models.Unigram([("a", -1.0)]),
    ],
)
def test_a_vocabulary_that_would_lose_text_is_refused(load, model):
    with pytest.raises(CorpusError, match="loses text: it has neither an unknown token nor") as caught:
        load(Tokenizer(model))
    assert "unk_token" in caught.value.remedy


def test_a_byte_level_vocabulary_without_every_byte_is_refused(load):
    made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    with pytest.raises(CorpusError, match="loses text"):
        load(made)


def test_which_token_is_the_unknown_one(load):
    assert load(unigram()).unknown == 0
    assert load(words()).unknown == 0
    assert load(byte_level()).unknown is None
    assert load(metaspace_bpe()).unknown is None


def test_lone_surrogates_do_not_stop_it(load):
    assert ids(load(byte_level()), "a\ud800") == ids(load(byte_level()), "a?")


def test_a_normalizer_that_inflates_text_is_refused(load):
    """A run's author is a stranger."""
    made = byte_level()
    made.normalizer = normalizers.Sequence([normalizers.Replace(Regex("."), "ab")] * 6)
    with pytest.raises(CorpusError, match="may lengthen a text more than 8 times"):
        load(made)
    made.normalizer = normalizers.Sequence([normalizers.Replace("a", "ab")] * 3)
    assert len(ids(load(made), "a")) > 1


def _charsmap(letter: str, replacement: str) -> bytes:
    """Return a table of sentencepiece for one ASCII letter: its trie is a double array of 32-bit units."""
    place, leaf, units = 256 ^ ord(letter), 600, [0] * 1024
    units[0], units[place] = 256 << 10, ord(letter) | 1 << 8 | (place ^ leaf) << 10
    return struct.pack("<I1024I", 4096, *units) + replacement.encode() + b"\0"


def test_a_table_of_replacements_may_not_inflate_text(load):
    """NFKC makes 18 letters of U+FDFA, and a file may say as much of each letter."""
    made = byte_level()
    made.normalizer = normalizers.Precompiled(_charsmap("e", "b" * 18))
    assert load(made).decode(ids(load(made), "ae")) == "a" + "b" * 18
    made.normalizer = normalizers.Precompiled(_charsmap("e", "b" * 145))
    with pytest.raises(CorpusError, match="may lengthen a text more than 8 times"):
        load(made)


def test_what_would_take_gigabytes_is_refused(load):
    """Check decoders that lengthen text, and long tokens."""
    made = byte_level()
    made.decoder = decoders.Sequence([decoders.Replace("a", "b" * 9), decoders.ByteLevel()])
    with pytest.raises(CorpusError, match="its decoder may lengthen a text more than 8 times"):
        load(made)
    made = byte_level()
    made.add_tokens(["x" * 1025])
    with pytest.raises(CorpusError, match="a token of 1,025 characters, and at most 1,024 are read"):
        load(made)


def test_a_panic_of_the_library_is_an_error_of_the_file(load):
    outline = json.loads(words().to_str())
    with pytest.raises(CorpusError, match="is not a tokenizer"):
        load(outline | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}})
    with pytest.raises(CorpusError, match="is not a tokenizer"):
        load(outline | {"pre_tokenizer": {"type": "FixedLength", "length": 0}})


@pytest.fixture
def cuts(tmp_path, monkeypatch):
    """``cuts(text, size)``: a document in pieces of about that many bytes."""

    def cuts(text: str, size: int) -> list[stream.Cut]:
        for name in ("LEAST_PIECE_BYTES", "MOST_PIECE_BYTES"):
            monkeypatch.setattr(reading, name, size)
        (tmp_path / "text").write_text(text)
        reader = reading.SourceReader(find_source(str(tmp_path / "text"), "", False))
        return [*iter(reader.next, None)]

    return cuts


def all_ids(found: list[stream.Cut], tokenizer: JsonTokenizer) -> np.ndarray:
    return np.concatenate([*stream.encode_documents(found, tokenizer)])


@EVERY
@pytest.mark.parametrize("size", [50, 61, 1000])
@pytest.mark.parametrize("text", ["the cat sat on the mat\n\n" * 40, "the\ncat\n\nsat\n" * 60, "the cat  on \n" * 50])
def test_pieces_give_the_ids_of_the_whole_document(load, cuts, make, size, text):
    """Also the prefix space, which a tokenizer puts at the start of all that it is given."""
    loaded = load(make())
    end = [] if loaded.separator is None else [loaded.separator]
    assert all_ids(cuts(text, size), loaded).tolist() == [*ids(loaded, text), *end]


def test_a_piece_never_joins_the_document_before_it(load):
    loaded = load(unigram())
    found = [stream.Cut("", "the ca", True, False), stream.Cut("the ca", "t", False, True)]
    found.append(stream.Cut("", "the", True, True))
    assert all_ids(found, loaded).tolist()[-2:] == [*ids(loaded, "the"), 1]


def test_text_without_borders_is_cut_anyway(load, cuts, monkeypatch):
    monkeypatch.setattr(stream, "BORDER_CHARACTERS", 20)
    loaded = load(byte_level())
    found = cuts("日本語" * 100, 50)
    assert len(found) > 10
    assert loaded.decode(all_ids(found, loaded).tolist()).replace("<|endoftext|>", "") == "日本語" * 100


def prepended() -> Tokenizer:
    made = metaspace_bpe()
    made.add_special_tokens([AddedToken("<t>", normalized=True)])
    return made


@pytest.mark.parametrize("make", [byte_level, metaspace_bpe, prepended, unigram])
def test_marked_text_is_encoded_as_plain_text_is(load, make):
    """Check that the text of a special token in a message adds no space, and that a border adds none."""
    tokenizer = load(make())
    for token in tokenizer.special_tokens:
        plain = f"the {token} cat{token}"
        ((found, starts),) = tokenizer.encode_marked([plain.replace(token, f"{token[0]}{SPECIAL_MARK}{token[1:]}")])
        assert found.tolist() == ids(tokenizer, plain)
        ((special, _),) = tokenizer.encode_marked([plain])
        assert special.tolist().count(tokenizer._tokenizer.token_to_id(token)) == 2
        assert starts[0] == 0
    apart, starts = tokenizer.encode_marked([f"the\n{BORDER_MARK}\nthe"])[0]
    assert tokenizer.decode(apart.tolist()) == tokenizer.decode(ids(tokenizer, "the\n\nthe"))
    assert 4 not in [start for start in starts.tolist() if start < 4]
    first = int(np.flatnonzero(starts >= 5)[0])
    assert apart[:first].tolist() == ids(tokenizer, "the\n")


def test_dropout_is_told(load):
    made = byte_level()
    made.model.dropout = 0.1
    assert load(made).unused == ["the tokenizer's BPE dropout of 0.1 is not used"]
    assert load(byte_level()).unused == []
