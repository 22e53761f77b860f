"""Byte tokenizer, tokenizer.json files, and files that are neither."""

import hashlib
import json
import resource

import pytest

from p2ptrain.base.errors import CorpusError
from p2ptrain.data import tokenizer
from p2ptrain.data.tokenizer import ByteTokenizer, load_tokenizer
from p2ptrain.manifest.sources import FileTokenizer

TEXT = "Où est la bibliothèque? \x01\x7f 日本語\n"


@pytest.fixture(scope="session")
def json_file(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the cat sat on the mat"] * 10, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def of_file(sha256: str) -> FileTokenizer:
    return FileTokenizer(kind="file", sha256=sha256)


def test_bytes_are_their_own_ids():
    ids = ByteTokenizer().encode_batch([TEXT, ""])
    assert ids[0].tolist() == list(TEXT.encode())
    assert len(ids[1]) == 0
    assert ByteTokenizer().decode(ids[0].tolist()) == TEXT


def test_what_is_no_text_does_not_stop_bytes():
    assert bytes(ByteTokenizer().encode_batch(["\ud800"])[0]) == b"?"
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


def test_a_zero_in_a_text_is_no_separator(tmp_path):
    from transformers import AutoTokenizer

    expected = list("one\ufffdtwo".encode())
    assert ByteTokenizer().encode_batch(["one\0two"])[0].tolist() == expected
    ByteTokenizer().save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("one\0two")["input_ids"] == expected


def test_saved_bytes_load_in_transformers_with_the_same_ids(tmp_path):
    from transformers import AutoTokenizer

    ByteTokenizer().save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXT)["input_ids"] == list(TEXT.encode())
    assert loaded.decode(list(TEXT.encode())) == TEXT


def test_a_file_by_digest(json_file, tmp_path):
    sha256 = hashlib.sha256(json_file.read_bytes()).hexdigest()
    loaded = load_tokenizer(of_file(sha256), json_file)
    ids = loaded.encode_batch(["the cat"])[0]
    assert loaded.decode(ids.tolist()) == "the cat"
    assert len(ids) < 7
    assert loaded.separator == 0
    assert loaded.vocabulary_size > 256
    loaded.save(tmp_path)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path)("the cat")["input_ids"] == ids.tolist()


def test_the_wrong_file_and_no_file_are_refused(json_file):
    wanted = of_file("0" * 64)
    with pytest.raises(CorpusError, match="not this run's tokenizer"):
        load_tokenizer(wanted, json_file)
    with pytest.raises(CorpusError, match="which is not here"):
        load_tokenizer(wanted)


@pytest.mark.parametrize("content", [" ", "no json", "[]", "{}", '{"model": 3}', '{"model": {"vocab": {}}}'])
def test_what_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(CorpusError, match="is not a tokenizer"):
        load_tokenizer(of_file(sha256), path)


def test_a_file_that_changes_while_it_is_read_is_refused(json_file, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(json_file.read_bytes())
    changed = json_file.read_text().replace('"id": 0', '"id":  0')
    monkeypatch.setattr(tokenizer, "check_digest", lambda *_: path.write_text(changed))
    with pytest.raises(CorpusError, match=r"tokenizer\.json changed while it was read"):
        load_tokenizer(of_file("0" * 64), path)


def test_an_oversized_tokenizer_is_refused_unread(json_file, monkeypatch):
    monkeypatch.setattr(tokenizer, "MOST_TOKENIZER_BYTES", 10)
    sha256 = hashlib.sha256(json_file.read_bytes()).hexdigest()
    with pytest.raises(CorpusError, match="larger than 10 bytes"):
        load_tokenizer(of_file(sha256), json_file)


def test_saved_json_is_readable(tmp_path):
    ByteTokenizer().save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_disk_that_does_not_take_it_is_the_systems_error(tmp_path):
    """Check a full disk: the library's own ``save`` raises a bare Exception, and callers expect an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            ByteTokenizer().save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_tokenizer_that_only_looks_like_one_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"type": "BPE", "vocab": {"a": "not a number"}, "merges": 3}}')
    spec = FileTokenizer(kind="file", sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(CorpusError, match="is not a tokenizer"):
        load_tokenizer(spec, path)
