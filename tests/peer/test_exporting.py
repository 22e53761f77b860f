"""``p2ptrain export``: the whole model or nothing, and what transformers loads is what training had."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from small_corpus import AWAY, stored_text
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from trained_model import generate_tokens, load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2ptrain import checkpoint
from p2ptrain.base.errors import DeviceError, UserError
from p2ptrain.data.tokenizer import JsonTokenizer, load_tokenizer
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.generate import Sampling
from p2ptrain.train.model import flat_model
from p2ptrain.train.published_config import model_section
from peer import cli, exporting, loading
from peer.exporting import export
from peer.home import Home

WHOLE = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


PLAIN = {
    "vocab_size": 600,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
ROTARY = {**PLAIN, "rope_theta": 20_000.0, "tie_word_embeddings": False}
GROUPED = {**ROTARY, "hidden_act": "silu", "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 24},
    "Gemma3ForCausalLM": {
        **GROUPED,
        "hidden_act": "gelu_pytorch_tanh",
        "num_hidden_layers": 2,
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10_000.0,
    },
    "Olmo2ForCausalLM": GROUPED,
    "SmolLM3ForCausalLM": {**GROUPED, "num_hidden_layers": 2, "no_rope_layer_interval": 2},
    "GPT2LMHeadModel": {**PLAIN, "hidden_act": "gelu_new"},
    "GPTNeoXForCausalLM": {**ROTARY, "hidden_act": "gelu"},
}
ROTARY_READ = {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 20_000.0, "num_key_value_heads": 1}
READ_BY_CONVERTERS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": ROTARY_READ,
    "MistralForCausalLM": ROTARY_READ,
    "Qwen2ForCausalLM": ROTARY_READ,
    "Qwen3ForCausalLM": ROTARY_READ | {"head_dim": 24},
    "Gemma3ForCausalLM": ROTARY_READ | {"rope_local_base_freq": 10_000.0, "sliding_window": 8, "head_dim": 24},
    "Olmo2ForCausalLM": ROTARY_READ,
    "SmolLM3ForCausalLM": ROTARY_READ | {"no_rope_layers": [1, 0]},
    "GPT2LMHeadModel": {"n_ctx": 64, "n_embd": 32, "n_head": 2, "layer_norm_epsilon": 1e-5},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25, "rotary_emb_base": 20_000.0, "layer_norm_eps": 1e-5},
}
"""Fields of config.json that a converter to GGUF needs. Source: llama.cpp as in llama-cpp-python 0.3.36,
``conversion/base.py:set_gguf_parameters``, ``gpt2.py`` and ``gptneox.py``, with its transformers 4.57.6.

The tokenizer must have a form that it knows: byte fallback in Llama or Mistral, or a byte-level BPE whose hash is in
``get_vocab_base_pre``. It assumes that GPT-2's intermediate_size is four times hidden_size."""

TEXT = "The cat's 12 hats: \"Où est l'été?\"\n\n  She sat down, didn't she? Then 345 birds flew away.\n" * 40
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]


def byte_level() -> Tokenizer:
    """Byte-level BPE as of GPT-2, with a lossy normalizer that no Qwen2 has."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    return made


def byte_fallback() -> Tokenizer:
    """BPE with a prefix space and bytes for unknown letters, as of Llama 2."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(TEXT.split("\n"), trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIAL, *bytes_]))
    tokenizer = json.loads(made.to_str())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in bytes_]
    return Tokenizer.from_str(json.dumps(tokenizer))


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        TEXT.split("\n"), trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>")
    )
    return made


def words() -> Tokenizer:
    """Whole words; ``</s>`` is an ordinary entry of the vocabulary."""
    vocabulary = {"<unk>": 0, "</s>": 1} | {word: 2 + place for place, word in enumerate(sorted(set(TEXT.split())))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


TOKENIZERS = {each.__name__: each for each in (byte_level, byte_fallback, unigram, words)}


def with_extras(tokenizer: Tokenizer) -> Tokenizer:
    """Add what files of fine-tuned models bring: a template, truncation, padding."""
    first = tokenizer.id_to_token(1)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 1)])
    tokenizer.enable_truncation(5000)
    tokenizer.enable_padding(length=3)
    return tokenizer


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load exports in this process, which takes a fraction of the time."""
    monkeypatch.setattr(exporting, "_load", loading.answer)
    modules = tmp_path_factory.getbasetemp() / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)


Trained = Callable[..., tuple[Home, Path]]


@pytest.fixture
def trained(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> Trained:
    """Return ``trained(family, tokenizer, corpus, init)``: a home with random weights; by default without its text."""

    def build(family: str, tokenizer: Tokenizer, corpus: object = AWAY, init: object = None) -> tuple[Home, Path]:
        file = tmp_path / "tokenizer.json"
        tokenizer.save(str(file))
        signed = signed_run(
            model={"architecture": family, "config": FAMILIES[family]} | ({} if init is None else {"init": init}),
            tokenizer={"kind": "file", "sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
            corpus=corpus,
        )
        home = home_of(signed, tmp_path / "home")
        home.files.add(hashlib.sha256(file.read_bytes()).hexdigest(), file.read_bytes())
        return home, file

    return build


def home_of(signed: SignedManifest, path: Path) -> Home:
    theta = flat_model(signed.manifest.model, 1, torch.device("cpu")).theta
    found = Home(path)
    found.path.mkdir()
    found.save_manifest(signed)
    checkpoint.save(found.checkpoints, {"slow": theta}, {"step": 1})
    return found


@pytest.fixture
def home(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> Home:
    """Return the home of a peer that has trained."""
    return home_of(signed_run(), tmp_path / "home")


@contextlib.contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """Limit the length of files, which fails in every library at the same place as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("is_there", [True, False])
def test_an_export_is_whole(
    home: Home, tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    if is_there:
        out.mkdir(parents=True)
        monkeypatch.chdir(out)
    export(home, Path() if is_there else out)
    assert names_in(out) == WHOLE
    assert names_in(out.parent) == {"out"}
    assert capfd.readouterr().err == ""  # no progress bar in a log
    with pytest.raises(UserError, match="exists and is not empty"):
        export(home, out)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_full_disk_leaves_nothing_and_the_next_try_is_as_the_first(
    home: Home, tmp_path: Path, is_there: bool
) -> None:
    out = tmp_path / "new" / "out"
    if is_there:
        out.mkdir(parents=True)
    with files_end_at(50_000), pytest.raises(UserError, match="out cannot be written: ") as caught:
        export(home, out)
    assert "choose another directory" in caught.value.remedy
    assert [path for path in (tmp_path / "new").rglob("*") if path != out] == []
    assert out.exists() is is_there
    export(home, out)
    assert names_in(out) == WHOLE


def test_a_full_disk_is_called_so(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tokenizer: object, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("p2ptrain.data.tokenizer.ByteTokenizer.save", full)
    with pytest.raises(UserError, match="out cannot be written: the disk is full"):
        export(home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_to_where_we_may_not_even_look(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, status = tmp_path / "closed" / "out", Path.stat

    def closed(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == out:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return status(path, follow_symlinks=follow_symlinks)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", closed)
        with pytest.raises(UserError, match="out cannot be written: Permission denied"):
            export(home, out)
    with pytest.raises(UserError, match="x cannot be written: File name too long"):
        export(home, tmp_path / ("x" * 300))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_training_s_ids_and_weights(
    family: str, make: Callable[[], Tokenizer], trained: Trained, tmp_path: Path
) -> None:
    home, file = trained(family, with_extras(make()))
    signed = home.load_manifest(None)
    assert signed is not None
    trained_with = load_tokenizer(signed.manifest.tokenizer, file)
    exported = export(home, tmp_path / "out")
    assert (exported.held_out_loss, exported.why_not) == (None, "The run's held-out text is not on this machine")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = TEXT[:200].replace("cat", "</s>\u65e5 A\u030a  cat")
    ids = loaded(text)["input_ids"]
    assert ids == trained_with.encode_batch([text])[0].tolist()
    assert loaded.decode(ids, skip_special_tokens=True) == trained_with.decode(ids)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == trained_with.separator
    assert model.config.use_cache
    assert model.generation_config.use_cache


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_begin_as_the_continued_model_s(
    family: str, make: Callable[[], Tokenizer], trained: Trained, tmp_path: Path
) -> None:
    """Check a run that began from a model whose tokenizer puts ``<s>`` before every text."""
    home, _file = trained(family, with_extras(made := make()), init={"kind": "file", "sha256": ["0" * 64]})
    export(home, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.bos_token == "<s>"
    assert loaded(TEXT[:200])["input_ids"] == [1, *made.encode(TEXT[:200], add_special_tokens=False).ids]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == 1


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_load_as_bytes(family: str, signed_run: Callable[..., SignedManifest], tmp_path: Path) -> None:
    signed = signed_run(model={"architecture": family, "config": FAMILIES[family]})
    exported = export(home_of(signed, tmp_path / "home"), tmp_path / "out")
    assert exported.held_out_loss is not None
    assert 5 < exported.held_out_loss.value < 12
    assert exported.held_out_loss.tokens == exported.held_out_loss.of
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.items() >= ({"eos_token_id": 0, "vocab_size": 600} | READ_BY_CONVERTERS[family]).items()
    assert model_section(config) == signed.manifest.model
    for_tokens = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert for_tokens.items() >= {"add_bos_token": False, "add_eos_token": False}.items()
    text = "\x00Ā<|endoftext|> é"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == list(
        text.replace("\0", "\ufffd").encode()
    )


@pytest.mark.usefixtures("in_process")
def test_scaled_positions_load_with_the_same_loss(signed_run: Callable[..., SignedManifest], tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    config = {**GROUPED, "head_dim": 24, "rope_scaling": scaling}
    signed = signed_run(model={"architecture": "LlamaForCausalLM", "config": config})
    assert export(home_of(signed, tmp_path / "home"), tmp_path / "out").held_out_loss is not None
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_scaling"] == scaling | {"rope_type": "llama3"}
    assert (written["head_dim"], written["rope_theta"]) == (24, 20_000.0)
    assert model_section(written) == signed.manifest.model


@pytest.mark.usefixtures("in_process")
def test_held_out_text_is_compared_too(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = byte_level()
    ids = np.array(tokenizer.encode(TEXT * 20, add_special_tokens=False).ids)
    section, index = stored_text(ids, ids[:2000], 32)
    home, _file = trained("GPT2LMHeadModel", tokenizer, section)
    home.files.add(index.root, index.to_bytes())
    seen: list[loading.Request] = []

    def load(request: loading.Request) -> loading.Answer:
        seen.append(request)
        return loading.answer(request)

    monkeypatch.setattr(exporting, "_load", load)
    exported = export(home, tmp_path / "out")
    assert exported.held_out_loss is not None
    assert len(seen[0]["texts"]) == 1 + len(seen[0]["rows"]) > 1
    assert "didn't she? then 345 birds" in "".join(seen[0]["texts"][1:])


@pytest.mark.usefixtures("in_process")
def test_special_tokens_in_text_are_split_where_training_splits_them(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, file = trained("LlamaForCausalLM", byte_level())
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True
    monkeypatch.setattr("peer.model.tokenizer_of", lambda *_: JsonTokenizer(tokenizer))
    export(home, tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("a <|endoftext|>")["input_ids"]
    assert tokenizer.token_to_id("<|endoftext|>") not in ids


@pytest.mark.usefixtures("in_process")
def test_an_export_says_what_it_does(home: Home, tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli.export, [str(home.path), str(tmp_path / "out")])
    said = ran.stdout.splitlines()
    assert [line.partition(":")[0] for line in said[:4]] == [
        "loading torch and transformers",
        "reading the checkpoint",
        "writing the files",
        "reading the held-out text",
    ]
    assert "checking that transformers loads the same model and tokenizer" in said
    assert re.fullmatch(r"held-out loss \d+\.\d{4}, from 65,536 tokens", said[-2])


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_small_model_is_written_as_transformers_writes_it(
    signed_run: Callable[..., SignedManifest], tmp_path: Path, family: str, is_tied: bool
) -> None:
    config = FAMILIES[family] | {"tie_word_embeddings": is_tied}
    trained = home_of(signed_run(model={"architecture": family, "config": config}), tmp_path / "home")
    export(trained, tmp_path / "out")
    model, tokenizer = load_model(trained)
    module = model.module
    for each in (module.config, module.generation_config):
        each.use_cache, each.eos_token_id = True, tokenizer.separator
    module.save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {name: value for name, value in written.items() if name in theirs} == theirs
    for name in ("model.safetensors", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_large_model_is_written_in_shards_with_an_index(
    signed_run: Callable[..., SignedManifest], tmp_path: Path, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "LlamaForCausalLM"
    config = FAMILIES[family] | {"tie_word_embeddings": is_tied}
    home = home_of(signed_run(model={"architecture": family, "config": config}), tmp_path / "home")
    export(home, tmp_path / "small")
    monkeypatch.setattr(exporting, "SHARD_BYTES", 20_000)
    export(home, tmp_path / "large")
    shards = sorted((tmp_path / "large").glob("*.safetensors"))
    assert len(shards) > 2
    largest = max(each.numel() for each in AutoModelForCausalLM.from_pretrained(tmp_path / "small").parameters())
    assert all(path.stat().st_size < max(20_000, 4 * largest) + 4_000 for path in shards)
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "large" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    small, large = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("small", "large"))
    assert index["metadata"] == {
        "total_parameters": small.num_parameters(),
        "total_size": 4 * small.num_parameters(),
    }
    for one, other in zip(small.parameters(), large.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_does_not_fit_is_refused(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.model.LOADED_BYTES", 1e9)
    with pytest.raises(DeviceError, match=r"take [\d.,]+ GB of memory, and [\d.]+ GB are free"):
        export(home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("in_process")
def test_generation_ends_with_the_document(home: Home, tmp_path: Path) -> None:
    export(home, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens are equally likely, and greedy search takes the first
    prompt = list(b"To be")
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
    assert ids[0].tolist() == [*prompt, 0]
    assert generate_tokens(model, prompt, 9, Sampling(temperature=0), stop=0) == []


@pytest.mark.usefixtures("in_process")
def test_a_umask_decides_who_may_read(home: Home, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export(home, tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == dict.fromkeys(
        WHOLE, "0o640"
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"loss": 9.0}, "AutoModelForCausalLM has a loss of 9.0000, and the peer's model"),
        ({"loss": float("nan")}, "AutoModelForCausalLM has a loss of nan"),
        ({"ids": [[1, 2]] * 2}, "AutoTokenizer makes 2 ids of a text of .*; number 1 differs"),
        ({"trusting_ids": [[1, 2]] * 2}, "AutoTokenizer with trust_remote_code=True makes 2 ids of a text of .*"),
    ],
)
def test_what_loads_as_something_else_is_no_export(
    home: Home, tmp_path: Path, fault: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(request: loading.Request) -> loading.Answer:
        right = loading.answer(request)
        return {**right, **fault}  # type: ignore[typeddict-item]

    monkeypatch.setattr(exporting, "_load", load)
    with pytest.raises(UserError, match=message):
        export(home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_no_export(
    signed_run: Callable[..., SignedManifest], tmp_path: Path, value: float
) -> None:
    home = home_of(signed_run(), tmp_path / "home")
    theta = flat_model(home.load_manifest(None).manifest.model, 1, torch.device("cpu")).theta  # type: ignore[union-attr]
    theta[-1] = value
    checkpoint.save(home.checkpoints, {"slow": theta}, {"step": 2})
    with pytest.raises(UserError, match="home is unusable: some of its weights are infinite or not a number"):
        export(home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time\ntime.sleep(60)\n", r"was not loaded by transformers within 0\.2 s"),
        ("raise OSError('no config.json')\n", r"cannot be loaded by transformers: OSError: no config\.json\."),
    ],
)
def test_an_export_that_does_not_load_is_none(
    home: Home, tmp_path: Path, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loading.py").write_text(code)
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "loading.py"))
    if "sleep" in code:
        monkeypatch.setattr(exporting, "LOAD_S", 0.2)
    with pytest.raises(UserError, match=message):
        export(home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("in_process")
def test_a_tokenizer_that_transformers_builds_itself_is_no_export(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _file = trained("Qwen2ForCausalLM", with_extras(byte_level()))
    monkeypatch.setattr(exporting, "REBUILT", ())
    with pytest.raises(UserError, match="AutoTokenizer makes"):
        export(home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.net
def test_a_fresh_process_loads_it(trained: Trained, tmp_path: Path) -> None:
    home, _file = trained("Qwen2ForCausalLM", with_extras(byte_level()))
    ran = CliRunner().invoke(cli.export, [str(home.path), str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert "held-out loss not measured: The run's held-out text is not on this machine" in ran.output
