"""A run that continues a published model ends texts as that model does, and its export keeps what training left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2ptrain import checkpoint
from p2ptrain.cli import cli
from p2ptrain.data.file_store import named_files, stored
from p2ptrain.manifest import load_run
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.opened import user_store
from p2ptrain.tokens.store import ShardStore
from p2ptrain.train.generate import Sampling
from p2ptrain.train.model import flat_model
from peer.exporting import export
from peer.home import Home
from peer.model import run_text
from peer.trained.chat import Conversation
from peer.trained.language_model import load
from tests.peer.trained.published import ENDOFTEXT, IM_END, IM_START, PAD, TEMPLATE, TEXT, published

SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
CHAT = {"chat_template": TEMPLATE, "pad_token": "<|pad|>", "bos_token": "<|im_start|>"}


def run_of(tmp_path: Path, model: Path) -> Path:
    """Return a signed run that continues a model on two documents."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(2)))
    for words in (["init", f"{tmp_path / 'run'}", "--model", f"{model}", "--corpus", f"{corpus}"], ["sign"]):
        ran = CliRunner().invoke(cli, words if len(words) > 1 else [*words, f"{tmp_path / 'run'}"])
        assert ran.exit_code == 0, ran.output
    return tmp_path / "run"


def home_of(run: Path, path: Path) -> Home:
    """Return the home of a peer that has the run's files and a checkpoint."""
    signed = load_run(run)
    home = Home(path)
    home.path.mkdir()
    home.save_manifest(signed)
    for file in named_files(signed.manifest):
        source = stored(run, file.sha256)
        assert source is not None, file
        home.files.add(file.sha256, source.read_bytes())
    fetch_text(home, run)
    theta = flat_model(signed.manifest.model, 1, torch.device("cpu")).theta
    checkpoint.save(home.checkpoints, {"slow": theta}, {"step": 1})
    return home


def fetch_text(home: Home, run: Path) -> None:
    """Put the run's shards where peers of this user have them."""
    corpus = load_run(run).manifest.corpus
    if corpus.kind == "builtin":
        return
    source, store = ShardStore(run / "shards"), user_store()
    index = home.files.find(corpus.root)
    assert index is not None
    for digest in ShardIndex.from_bytes(index.read_bytes()).digests:
        store.add(digest, source.path(digest).read_bytes())


SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None, int, list[int]]] = {
    "config.json alone": ({}, {"eos_token_id": IM_END}, None, IM_END, [IM_END]),
    "generation goes before": ({}, {"eos_token_id": ENDOFTEXT}, {"eos_token_id": IM_END}, IM_END, [IM_END]),
    "the tokenizer alone": ({"eos_token": "<|im_end|>"}, {}, None, IM_END, [IM_END]),
    "the tokenizer chooses": (
        {"eos_token": {"content": "<|im_end|>"}},
        {},
        {"eos_token_id": [ENDOFTEXT, IM_END]},
        IM_END,
        [IM_END, ENDOFTEXT],
    ),
    "the first of several": ({}, {"eos_token_id": [PAD, IM_END]}, {}, PAD, [PAD, IM_END]),
    "an id of ordinary text": ({}, {"eos_token_id": 70}, None, ENDOFTEXT, [ENDOFTEXT]),
    "nothing": ({}, {}, None, ENDOFTEXT, [ENDOFTEXT]),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("source", SOURCES)
def test_documents_end_as_the_published_model_s(tmp_path: Path, source: str) -> None:
    names, config, generation, end, ends = SOURCES[source]
    model = published(tmp_path / "model", names, config, generation)
    run = run_of(tmp_path, model)
    home = home_of(run, tmp_path / "home")
    manifest = load_run(run).manifest
    index = run_text(home, manifest).index
    parts = [user_store().map(each.digest, index.id_bytes, each.tokens) for each in (*index.training, *index.held_out)]
    counts = [sum(int((part == each).sum()) for part in parts if part is not None) for each in range(4)]
    assert counts == [2 if each == end else 0 for each in range(4)], "training"
    export(home, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == end
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.eos_token_id == end
    assert loaded.generation_config.eos_token_id == (ends if len(ends) > 1 else end)
    found = load(home.path, "cpu")
    assert (found.tokenizer.separator, {end, *found.ends}) == (end, set(ends)), "chat"


@pytest.mark.usefixtures("in_process")
def test_an_export_keeps_template_pad_token_and_how_to_generate(tmp_path: Path) -> None:
    generation = {"eos_token_id": [IM_END, ENDOFTEXT], "pad_token_id": PAD, **SAMPLING, "max_new_tokens": -1}
    model = published(tmp_path / "model", {**CHAT, "eos_token": "<|im_end|>"}, {}, generation)
    home = home_of(run_of(tmp_path, model), tmp_path / "home")
    export(home, tmp_path / "refused")
    written = json.loads((tmp_path / "refused" / "generation_config.json").read_text())
    assert "temperature" not in written, "numbers that transformers refuses would make the export unusable"
    del generation["max_new_tokens"]
    (model / "generation_config.json").write_text(json.dumps(generation))
    again = tmp_path / "again"
    again.mkdir()
    home = home_of(run_of(again, model), again / "home")
    export(home, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|im_end|>")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    said = [{"role": "user", "content": "The cat"}]
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(said, return_dict=False)
    assert tokenizer.apply_chat_template(said, return_dict=False) == expected
    assert expected.count(IM_END) == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (loaded.config.pad_token_id, loaded.generation_config.pad_token_id) == (PAD, PAD)
    assert (loaded.config.bos_token_id, loaded.generation_config.bos_token_id) == (IM_START, IM_START)
    assert {name: getattr(loaded.generation_config, name) for name in SAMPLING} == SAMPLING
    dialogue = Conversation.with_model(load(home.path, "cpu"), 4, Sampling(), pytest.fail)
    assert dialogue.stops == {IM_END, ENDOFTEXT}


def test_another_tokenizer_leaves_the_settings_out(tmp_path: Path) -> None:
    model = published(tmp_path / "model", {**CHAT, "eos_token": "<|im_end|>"}, {}, None)
    other = published(tmp_path / "other", {}, {}, None) / "tokenizer.json"
    (corpus := tmp_path / "text.txt").write_text("The cat sat on the mat. " * 400)
    words = ["init", f"{tmp_path / 'run'}", "--model", f"{model}", "--tokenizer", f"{other}", "--corpus", f"{corpus}"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert CliRunner().invoke(cli, ["sign", f"{tmp_path / 'run'}"]).exit_code == 0
    manifest = load_run(tmp_path / "run").manifest
    assert manifest.tokenizer.model_dump().keys() == {"kind", "sha256"}
    assert manifest.model.init is not None
    assert manifest.model.init.settings is None
