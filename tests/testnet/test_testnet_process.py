"""A whole testnet with everything real, small: one bootstrap, two peers, a solo run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.manifest import preset, render_toml, with_changes

pytestmark = pytest.mark.net

TINY = {
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 1,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 2,
    "run.tokens_per_peer": 100_000_000,
    "training.schedule": "constant",
    "training.warmup_tokens": 3_000,
    "swarm.final_gossip_s": 20.0,
}


def watched(log: Path, testnet: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the page shows as soon as both peers have told of themselves and of an exchange."""
    deadline = time.monotonic() + 200.0
    document: dict[str, Any] = {"peers": [], "exchanges": []}
    while len([row for row in document["peers"] if row["tokens"]]) < 2 or not document["exchanges"]:
        assert time.monotonic() < deadline, document
        assert testnet.poll() is None, log.read_text()
        found = re.search(r"watch them at (http://127\.0\.0\.1:\d+/)", log.read_text())
        if found is not None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{found[1]}status", timeout=10) as answer:
                document = json.load(answer)
        time.sleep(0.2)
    return document


def test_two_peers_train_together_and_the_report_tells(tmp_path: Path) -> None:
    (tmp_path / "p2ptrain").mkdir()  # as where a clone lies: no package of ours
    (tmp_path / "tiny.toml").write_text(render_toml(with_changes(preset("demo", "ab" * 32), TINY)))
    command = Path(sys.executable).parent / "p2ptrain"
    arguments = ["testnet", "--manifest", "tiny.toml", "--peers", "2", "--seed", "5", "--out", "out", "--page", "0"]
    arguments += ["--seconds", "20"]  # however fast this machine is, whoever watches sees it
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    log = tmp_path / "log"
    with log.open("wb") as output:
        testnet = subprocess.Popen(
            [command, *arguments], cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        seen = watched(log, testnet)
        assert testnet.wait(240) == 0, log.read_text()
    finally:
        testnet.kill()
        testnet.wait()
    assert {row["nickname"] for row in seen["peers"]} == {"peer-1", "peer-2"}
    assert all(row["device"] == "cpu" for row in seen["peers"])
    assert seen["exchanges"]
    assert seen["join"].endswith(" --local")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["passed"]
    assert summary["cut_short"]
    assert summary["seed"] == 5
    assert len(summary["peers"]) == 2
    for peer in summary["peers"]:
        assert peer["exchanges_ok"] >= 1
        assert peer["val_loss_last"] < peer["val_loss_first"]
    assert all(peer["tokens"] > 0 for peer in summary["peers"])
    assert summary["averaged_val_loss"] < summary["peers"][0]["val_loss_first"]
    assert summary["solo_val_loss"] < summary["peers"][0]["val_loss_first"]
    assert 0 <= summary["final_disagreement"] < 1
    assert summary["sample"] in log.read_text()
    generated = subprocess.run(
        [command, "generate", "out/peer-1", "To be, or not"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert generated.returncode == 0, generated.stderr
    assert "To be, or not" in generated.stdout
