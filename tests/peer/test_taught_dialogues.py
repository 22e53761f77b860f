"""A swarm that is taught a few hundred dialogues answers in their form; its files come by the link."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_corpus import stored_dialogues
from swarm import TOGETHER, Swarm
from trained_model import generate_tokens, load_model
from transformers import AutoTokenizer

from p2ptrain.data.chat_template import ChatTemplate
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.file_store import FileStore
from p2ptrain.tokens.store import ShardStore
from p2ptrain.train.generate import Sampling
from peer.exporting import export
from peer.home import Home
from peer.model import newest, run_template
from peer.trained.evaluate_command import evaluate
from tests.data.dialogues import COLOURS, made, write_jsonl

pytestmark = pytest.mark.lab

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role[0] + '>' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
CHANGES: dict[str, Any] = {
    "model.config.hidden_size": 64,
    "model.config.intermediate_size": 128,
    "model.config.num_hidden_layers": 2,
    "model.config.max_position_embeddings": 64,
    "training.sequence_length": 64,
    "training.learning_rate": 5e-3,
    "run.tokens": 500_000,
}


def check_chat(swarm: Swarm, home: Home) -> None:
    """Check that ``p2ptrain chat`` gives the taught answers by a pipe; its window has room for one question each."""
    asked = "".join(f"say {colour}\n" for colour in COLOURS)
    command = [sys.executable, "-m", "p2ptrain.cli", "chat", str(home.path), "--device", "cpu"]
    command += ["--temperature", "0", "--new-tokens", "32"]
    done = subprocess.run(
        command, env=swarm.environment, input=asked, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n\n") == [*(f"it is {colour}!" for colour in COLOURS), ""]


def test_a_swarm_that_is_taught_dialogues_answers_in_their_form(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    chats = write_jsonl(tmp_path / "chats.jsonl", made(400))
    digest = hashlib.sha256(template.read_bytes()).hexdigest()
    corpus, index = stored_dialogues(
        made(400),
        CHANGES["training.sequence_length"],
        ChatTemplate.load(digest, template),
        ShardStore(tmp_path / "shards"),
        template=digest,
        end_of_turn="",
    )
    with Swarm(**CHANGES, corpus=corpus) as swarm:
        (swarm.root / "run" / "shards").symlink_to(tmp_path / "shards")
        files = FileStore(swarm.root / "run" / "files")
        files.add(index.root, index.to_bytes())
        files.add(digest, template.read_bytes())
        swarm.bootstrap()
        peers = [swarm.peer(name, script=TOGETHER) for name in ("anna", "bert")]
        swarm.begin_together(peers)
        assert [each.end() for each in peers] == [0, 0], "\n".join(each.output[-2000:] for each in peers)
        assert peers[0].events("got file", what="template")
        assert peers[0].events("exchanged")
        home = Home(peers[0].home)
        model, tokenizer = load_model(home)
        chat = run_template(home, newest(home)[0], tokenizer)
        assert chat is not None
        encoder = ChatEncoder(chat, tokenizer)
        for colour in COLOURS:
            prompt = encoder.prompt_ids([{"role": "user", "content": f"say {colour}"}]).tolist()
            answer = generate_tokens(model.module, prompt, 30, Sampling(temperature=0), tokenizer.separator)
            assert tokenizer.decode(answer) == f"it is {colour}!\n"
        check_chat(swarm, home)
        judged = CliRunner().invoke(evaluate, [str(home.path), str(chats), "--device", "cpu", "--json"])
        assert judged.exception is None, judged.output
        assert json.loads(judged.stdout)["loss"] < 0.1
        export(home, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<u>hi\n<a>"
