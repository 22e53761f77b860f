"""A swarm goes on from a published model, offline: it begins at that model's loss and ends below it.

One of its three peers trains on two ranks, each of which reads its stage's part of the weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm import TOGETHER, Swarm

from p2ptrain.data.tokenizer import ByteTokenizer
from p2ptrain.manifest import read_run, render_toml, sign_run, with_changes
from p2ptrain.manifest.directory import MANIFEST_FILE
from p2ptrain.tokens import builtin
from p2ptrain.train.model import build_module, summed_loss

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))
from families import DESCRIPTIONS, description

pytestmark = pytest.mark.net

LLAMA = "LlamaForCausalLM"
STEPS, SEQUENCES, TOKENS = 120, 16, 33
RANDOM_LOSS = 5.5
"""Loss of random weights on bytes, in nats: the logarithm of 256."""


def halves() -> tuple[bytes, bytes]:
    """Return parts of the two halves of the shipped text."""
    text = builtin.text("shakespeare").tobytes()
    middle = len(text) // 2
    return text[:300_000], text[middle : middle + 150_000]


def publish(folder: Path, architecture: str, text: bytes) -> None:
    """Train a tiny model of a family for seconds, and write what its publisher would."""
    torch.manual_seed(0)
    is_tied = architecture != "GPTNeoXForCausalLM"  # whose published models are not
    module = build_module(description(architecture, tie_word_embeddings=is_tied), 7)
    optimizer = torch.optim.AdamW(module.parameters(), 3e-3)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - TOKENS, (SEQUENCES,))
        batch = torch.stack([data[start : start + TOKENS] for start in starts])
        optimizer.zero_grad()
        (summed_loss(module, batch, None) / (SEQUENCES * (TOKENS - 1))).backward()
        optimizer.step()
    module.to(torch.bfloat16).save_pretrained(folder)
    ByteTokenizer().save(folder)


@pytest.mark.parametrize(
    "architecture",
    [each if each == LLAMA else pytest.param(each, marks=pytest.mark.lab) for each in DESCRIPTIONS],
)
def test_three_peers_continue_a_published_model(tmp_path: Path, architecture: str) -> None:
    earlier, text = halves()
    publish(tmp_path / "model", architecture, earlier)
    (tmp_path / "text.txt").write_bytes(text)
    with Swarm() as swarm:
        run = swarm.root / "continued"
        command = [sys.executable, "-m", "p2ptrain.cli", "init", str(run), "--model", str(tmp_path / "model")]
        command += ["--corpus", str(tmp_path / "text.txt")]
        done = subprocess.run(command, env=swarm.environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert "weights, which peers get by the link" in done.stdout
        changes: dict[str, Any] = {
            "run.tokens": 80_000,
            "training.warmup_tokens": 5_000,
            "training.learning_rate": 2e-3,
        }
        changes |= {"training.sequences_per_step": 8, "outer.inner_steps": 5}
        changes |= {"outer.cut": "layers", "outer.fragments": 4, "outer.fragments_per_exchange": 4}
        manifest = with_changes(read_run(run), changes)
        (run / MANIFEST_FILE).write_text(render_toml(manifest))
        (swarm.root / "run").rename(swarm.root / "unused")
        run.rename(swarm.root / "run")
        sign_run(swarm.root / "run")
        bootstrap = swarm.bootstrap()
        bootstrap.wait_to_say("peers that lack the run's weights get them here")
        anna = swarm.peer("anna", "--devices", "cpu,cpu")
        others = [swarm.peer(name, script=TOGETHER) for name in ("bob", "carl")]
        anna.wait_for("first inner step")  # its ranks start later than a process alone
        swarm.begin_together(others)
        peers = [anna, *others]
        for each in peers:
            assert each.end() == 0, each.output[-3000:]
            assert [note["what"] for note in each.events("got file") if note["what"] == "weights"] == ["weights"]
            assert each.events("exchanged")
        figures: list[dict[str, Any]] = [
            json.loads((each.home / "summary.json").read_text()) for each in [anna, *others]
        ]
    first, last = ([each[f"val_loss_{which}"] for each in figures] for which in ("first", "last"))
    assert first == pytest.approx([first[0]] * 3, rel=1e-5), "the peers begin at different weights"
    assert first[0] < RANDOM_LOSS - 1
    assert max(last) < first[0]
