"""An export of a run that was taught dialogues: transformers applies the same template to the same ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_corpus import AWAY
from test_exporting import TOKENIZERS, Trained, in_process, trained
from transformers import AutoTokenizer

from p2ptrain.base.errors import UserError
from p2ptrain.data.chat_template import CHATML_SOURCE
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.packed_stream import load_template
from p2ptrain.data.tokenizer import JsonTokenizer
from peer import exporting, loading
from peer.exporting import export

__all__ = ["in_process", "trained"]

CORPUS = {**AWAY, "template": "chatml"}
MESSAGES = [{"role": "system", "content": "Brief!"}, {"role": "user", "content": "The cat's 12 hats?"}]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("family", "make"),
    [("LlamaForCausalLM", name) for name in ("byte_level", "byte_fallback", "unigram")]
    + [("Qwen2ForCausalLM", "byte_level")],
)
def test_transformers_applies_the_template_as_training_did(
    trained: Trained, tmp_path: Path, family: str, make: str
) -> None:
    tokenizer = TOKENIZERS[make]()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    home, _file = trained(family, tokenizer, CORPUS)
    export(home, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHATML_SOURCE
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ours = JsonTokenizer(tokenizer)
    signed = home.load_manifest(None)
    assert signed is not None
    template = load_template(signed.manifest.corpus, ours)
    expected = ChatEncoder(template, ours).prompt_ids(MESSAGES).tolist()
    assert loaded.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False) == expected
    end = tokenizer.token_to_id("<|im_end|>")
    assert expected.count(end) == 2
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == end
    described = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (described["eos_token"], described["chat_template"]) == ("<|im_end|>", CHATML_SOURCE)
    assert loaded.eos_token_id == end


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("today", ["", "{{ strftime_now('%d %b %Y') }}"])
def test_a_template_writes_the_eos_token_of_training(trained: Trained, tmp_path: Path, today: str) -> None:
    source = f"{today}{{% for m in messages %}}{{{{ eos_token }}}}{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    template = tmp_path / "own.jinja"
    template.write_text(source)
    digest = hashlib.sha256(source.encode()).hexdigest()
    tokenizer = TOKENIZERS["byte_level"]()
    tokenizer.add_special_tokens(["<|im_end|>"])
    home, _file = trained("LlamaForCausalLM", tokenizer, {**CORPUS, "template": digest})
    home.files.add(digest, source.encode())
    export(home, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.eos_token == "<|im_end|>"
    rendered = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered.endswith(f"{JsonTokenizer(tokenizer).separator_text}Hi<|im_end|>")


@pytest.mark.usefixtures("in_process")
def test_another_template_is_noticed(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, _file = trained("LlamaForCausalLM", TOKENIZERS["byte_level"](), CORPUS)
    load: Callable[[loading.Request], loading.Answer] = loading.answer

    def other(request: loading.Request) -> loading.Answer:
        (Path(request["folder"]) / "chat_template.jinja").write_text("{{ messages[0].content }}")
        return load(request)

    monkeypatch.setattr(exporting, "_load", other)
    with pytest.raises(UserError, match="apply_chat_template makes other ids"):
        export(home, tmp_path / "out")
    assert not (tmp_path / "out").exists()
