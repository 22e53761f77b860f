"""A new run for a published model: sizes, tokenizer and weights are taken as they are, training numbers suit them."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DESCRIPTIONS, description
from safetensors.torch import load_file, save_file
from transformers.utils.chat_template_utils import render_jinja_template

from p2ptrain.base.errors import CorpusError, ManifestError, UserError, WeightsError
from p2ptrain.cli import check_kept_weights
from p2ptrain.data.chat_template import ChatTemplate
from p2ptrain.data.own_text import NewRun, Wanted, create
from p2ptrain.data.tokenizer import ByteTokenizer
from p2ptrain.manifest import PRESETS, parameter_count, preset, read_run, with_changes
from p2ptrain.manifest.fitting import continued, nearest_preset
from p2ptrain.train.existing_model import read_model
from p2ptrain.train.model import build_module

sys.path.insert(0, str(Path(__file__).parent.parent))
from hub import NAME, REVISION, serving, use

from tests.data.dialogues import made, write_jsonl

LLAMA = "LlamaForCausalLM"


def published(folder: Path, architecture: str = LLAMA, **options: Any) -> Path:
    """Write a model as transformers publishes it, with a tokenizer of bytes."""
    build_module(description(architecture), 7).to(torch.bfloat16).save_pretrained(folder, **options)
    ByteTokenizer().save(folder)
    return folder


def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("All the world is a stage, and all the men and women merely players. " * 300)
    return path


def new_run(
    tmp_path: Path,
    where: str | Path,
    corpus: Path | None = None,
    tokenizer: Path | None = None,
    template: Path | None = None,
) -> NewRun:
    corpora = (f"{corpus or text(tmp_path)}",)
    wanted = Wanted(corpora, tokenizer, model=read_model(f"{where}"), template=template)
    return create(tmp_path / "run", wanted, lambda *_: None)


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_each_family_becomes_a_run(tmp_path: Path, architecture: str) -> None:
    folder = published(tmp_path / "model", architecture)
    made = new_run(tmp_path, folder, text(tmp_path))
    manifest = read_run(tmp_path / "run")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert made.manifest == manifest
    assert manifest.model.init is not None
    assert manifest.model.init.model_dump() == {"kind": "file", "sha256": [digest]}
    assert manifest.model.config == description(architecture).config
    assert made.stored == ["tokenizer", "weights"]
    assert {path.name for path in (tmp_path / "run" / "files").iterdir()} >= {digest}


def test_training_suits_a_model_that_is_trained_already(tmp_path: Path) -> None:
    made = new_run(tmp_path, published(tmp_path / "model"), text(tmp_path))
    training = made.manifest.training
    assert (training.optimizer, training.schedule, training.sequence_length) == ("adamw", "cosine", 32)
    assert training.learning_rate < min(each["training"]["learning_rate"] for each in PRESETS.values())
    assert 0 < training.warmup_tokens * 100 <= made.manifest.run.tokens
    assert "continued with adamw" in made.reason


def test_shards_are_named_in_order(tmp_path: Path) -> None:
    folder = published(tmp_path / "model", max_shard_size="8KB")
    made = new_run(tmp_path, folder)
    paths = sorted(folder.glob("*.safetensors"))
    assert len(paths) > 1
    assert made.manifest.model.init is not None
    assert made.manifest.model.init.sha256 == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def test_a_file_has_its_config_beside_it(tmp_path: Path) -> None:
    folder = published(tmp_path / "model")
    assert new_run(tmp_path, folder / "model.safetensors").manifest.model.init is not None
    (folder / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json, which describes the model, cannot be read"):
        read_model(f"{folder}")


def test_a_model_of_the_hub_is_named_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published(tmp_path / "model")
    with serving({path.name: path.read_bytes() for path in folder.iterdir()}) as hub:
        use(hub.url, tmp_path, monkeypatch)
        model = read_model(f"hf:{NAME}")
        assert model.section.init is not None
        assert model.section.init.model_dump() == {"kind": "hub", "name": NAME, "revision": REVISION}
        assert model.tokenizer is not None
        assert model.tokenizer.read_bytes() == (folder / "tokenizer.json").read_bytes()
        assert read_model(f"hf:{NAME}@{REVISION}") == model
        hub.files["config.json"] = b"[]"
        hub.asked.clear()
        model.tokenizer.with_name("config.json").unlink()
        for blob in (tmp_path / "their cache").rglob("blobs/*"):
            blob.unlink()
        with pytest.raises(WeightsError, match=f"config.json of {NAME} at revision {REVISION} is not a table"):
            read_model(f"hf:{NAME}")


OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
OWN += "{% if add_generation_prompt %}<assistant>{% endif %}"
PLACES: dict[str, dict[str, object]] = {
    "chat_template.jinja": {"chat_template.jinja": OWN},
    "a text": {"tokenizer_config.json": {"chat_template": OWN}},
    "the default of several": {
        "tokenizer_config.json": {
            "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": OWN}]
        }
    },
    "no template": {"tokenizer_config.json": {"chat_template": None}},
    "no JSON": {"tokenizer_config.json": "{"},
    "too long": {"chat_template.jinja": "x" * (1 + (256 << 10))},
    "none is the default": {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "x"}]}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_hub", [False, True])
def test_dialogues_take_the_models_own_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, is_hub: bool
) -> None:
    folder = published(tmp_path / "model")
    for name, content in PLACES[place].items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    with serving({path.name: path.read_bytes() for path in folder.iterdir()}) as hub:
        use(hub.url, tmp_path, monkeypatch)
        template = read_model(f"hf:{NAME}" if is_hub else f"{folder}").template
    if place in ("too long", "none is the default"):
        assert isinstance(template, CorpusError), "an author must choose"
        assert "--template chatml" in template.remedy
    else:
        expected = None if place in ("no template", "no JSON") else OWN
        assert template == expected


def test_a_kept_template_writes_the_models_own_special_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a run's peers, who have no tokenizer_config.json, render what its publisher's library does."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    folder = published(tmp_path / "model")
    source = "\n{{ bos_token }}" + OWN + "{{ eos_token }}{# \n #}"
    tokens = {"bos_token": {"content": 'a"b\\n%}'}, "eos_token": "Ende ü🙂", "pad_token": "p", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **tokens}))
    kept = read_model(f"{folder}").template
    assert isinstance(kept, str)
    assert "pad_token" not in kept
    [dialogue] = made(1)
    texts, _ = render_jinja_template(
        [dialogue], chat_template=source, bos_token=tokens["bos_token"]["content"], eos_token=tokens["eos_token"]
    )
    template = ChatTemplate.checked(kept, "kept", {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(dialogue) == texts[0]


def test_only_dialogues_need_a_template_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    folder = published(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("x" * (1 + (256 << 10)))
    chats = write_jsonl(tmp_path / "chats.jsonl", made(300))
    with pytest.raises(
        CorpusError, match=r"chat template is not known\. .*chat_template\.jinja is larger than 262,144"
    ):
        new_run(tmp_path, folder, chats)
    assert new_run(tmp_path, folder, text(tmp_path)).manifest.corpus.kind == "shards"


def test_a_template_that_is_named_comes_before_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    folder = published(tmp_path / "model")
    build_module(description(LLAMA, max_position_embeddings=256), 7).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(OWN)
    (other := tmp_path / "other.jinja").write_text(OWN + "\n")
    chats = write_jsonl(tmp_path / "chats.jsonl", made(3000))
    found = []
    for number, template in enumerate((None, Path("chatml"), other)):
        (parent := tmp_path / f"{number}").mkdir()
        corpus = new_run(parent, folder, chats, template=template).manifest.corpus
        assert corpus.kind == "shards"
        found.append(corpus.template)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "chat_template.jinja", other)]
    assert found == [digests[0], "chatml", digests[1]]


def unsupported(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))


def enlarged(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32, "head_dim": 8}))


def pickled(folder: Path) -> None:
    torch.save({"a": torch.zeros(3)}, folder / "model.safetensors")


BROKEN = {
    "another family": (unsupported, ManifestError, "model_type 'bert'"),
    "other sizes": (enlarged, WeightsError, "has the shape"),
    "a pickle": (pickled, WeightsError, "is not a whole safetensors file"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), WeightsError, "is not a table in JSON"),
    "deep JSON": (lambda folder: (folder / "config.json").write_text("[" * 10**5), WeightsError, "is not a table"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        WeightsError,
        "has neither model.safetensors",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), CorpusError, "has no tokenizer.json"),
}


@pytest.mark.parametrize(("change", "kind", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_model_makes_no_run(tmp_path: Path, change: Any, kind: type[UserError], said: str) -> None:
    folder = published(tmp_path / "model")
    change(folder)
    with pytest.raises(kind, match=said):
        new_run(tmp_path, folder)
    assert not (tmp_path / "run" / "manifest.toml").exists()


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="There is no model"):
        read_model(f"{tmp_path / 'nothing'}")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [
        {"id": 256, "content": "<more>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        | {"single_word": False}
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ManifestError, match="has 257 ids, but the model has only 256") as caught:
        new_run(tmp_path, folder, None, tmp_path / "tokenizer.json")
    assert "its own tokenizer, or from one that was enlarged by resize_token_embeddings(257)" in caught.value.remedy
    assert "vocab_size" not in caught.value.remedy  # which the weights determine


def shortened(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")


def deepened(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


@pytest.mark.parametrize("change", [enlarged, shortened, deepened])
@pytest.mark.parametrize("is_of_hub", [False, True])
def test_weights_of_another_model_have_a_remedy_that_is_not_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, is_of_hub: bool
) -> None:
    """Check that the remedy is not what the author just did."""
    folder = published(tmp_path / "model")
    change(folder)
    with serving({path.name: path.read_bytes() for path in folder.iterdir()}) as hub:
        use(hub.url, tmp_path, monkeypatch)
        with pytest.raises(WeightsError, match="described model") as caught:
            read_model(f"hf:{NAME}" if is_of_hub else f"{folder}")
    assert caught.value.remedy.startswith("Get config.json and weights of one model")
    assert "--model" not in caught.value.remedy


def test_weights_of_the_hub_that_are_too_large_have_that_remedy_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published(tmp_path / "model")
    monkeypatch.setattr("p2ptrain.data.hub_weights.most_bytes", lambda model: 9)
    with serving({path.name: path.read_bytes() for path in folder.iterdir()}) as hub:
        use(hub.url, tmp_path, monkeypatch)
        with pytest.raises(WeightsError, match="take at most 9") as caught:
            read_model(f"hf:{NAME}")
    assert "--model" not in caught.value.remedy


def test_a_model_of_the_hub_without_a_tokenizer_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with serving({path.name: path.read_bytes() for path in folder.iterdir()}) as hub:
        use(hub.url, tmp_path, monkeypatch)
        with pytest.raises(CorpusError, match=r"has no tokenizer\.json") as caught:
            new_run(tmp_path, f"hf:{NAME}")
    assert "--tokenizer FILE" in caught.value.remedy


def test_edited_sizes_are_refused_when_the_run_is_signed(tmp_path: Path) -> None:
    made = new_run(tmp_path, published(tmp_path / "model"))
    check_kept_weights(tmp_path / "run", made.manifest)
    with pytest.raises(WeightsError, match="more, which the described model lacks") as caught:
        check_kept_weights(tmp_path / "run", with_changes(made.manifest, {"model.config.num_hidden_layers": 1}))
    assert caught.value.remedy.startswith(
        "Get config.json and weights of one model, at one revision, and do not edit [model]"
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lm_head.weight", 1.5, r"the tied weights model\.embed_tokens\.weight, lm_head\.weight differ"),
        ("model.norm.weight", float("nan"), r"numbers in model\.norm\.weight that are not finite"),
        ("model.embed_tokens.weight", float("-inf"), r"numbers in model\.embed_tokens\.weight that are not finite"),
    ],
)
def test_weights_from_which_no_peer_could_begin_are_refused(tmp_path: Path, name: str, value: float, said: str) -> None:
    folder = published(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = {each: tensor.clone() for each, tensor in load_file(path).items()}
    tensors.setdefault(name, tensors["model.embed_tokens.weight"].clone())[-1] = value
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=said):
        read_model(f"{folder}")


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_own_model_is_continued_with_its_shape_of_run(name: str) -> None:
    start = preset(name, "ab" * 32)
    assert nearest_preset(start.model) == name
    run = with_changes(start, continued(start.model, name))
    assert parameter_count(run.model) == parameter_count(start.model)
    assert run.tokens_per_outer_step == start.tokens_per_outer_step
    assert run.outer == start.outer
