"""Text of scenarios in shards: written before the run is signed, and counted by who sent it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sample_artifacts import WELL, artifacts, figures, record

from lab import scenario as scenarios
from lab.plan import manifest_of
from lab.text import write_text
from p2ptrain.manifest.sources import ShardsCorpus
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.store import ShardStore
from peer.testnet.plan import lay_out

SCENARIO = Path(__file__).parent.parent / "scenarios" / "shards_join.toml"


def test_the_manifest_names_the_shards_that_lie_in_the_run(tmp_path: Path) -> None:
    manifest = write_text(tmp_path / "text", manifest_of(scenarios.load(SCENARIO)), 2, seed=1)
    plan = lay_out(tmp_path, manifest, ["home-1"], source=tmp_path / "text")
    assert isinstance(manifest.corpus, ShardsCorpus)
    index = ShardIndex.from_bytes((plan.run / "files" / manifest.corpus.root).read_bytes())
    store = ShardStore(plan.run / "shards")
    assert (index.root, index.training_shards) == (manifest.corpus.root, 2)
    assert len(store.held(index)) == len(index.digests)
    batch = ShardCorpus(index, store, manifest.training.sequence_length).step_batch(1, "amber", 0, 4)
    assert 97 <= int(batch.max()) < 256


def test_equal_seeds_write_equal_text(tmp_path: Path) -> None:
    manifest = manifest_of(scenarios.load(SCENARIO))
    written = [write_text(tmp_path / name, manifest, 1, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert written[0] == written[1] != written[2]


def got(time: float, shard: int, source: str) -> dict[str, Any]:
    return {"kind": "got shard", "time": time, "shard": shard, "source": source}


def test_shards_are_counted_by_who_sent_them() -> None:
    amber = artifacts("amber", {"kind": "start", "time": 1.0}, got(2.0, 0, "boot"), {"kind": "progress", "time": 5.0})
    birch = artifacts("birch", {"kind": "start", "time": 1.0}, got(3.0, 0, "id of amber"), got(4.0, 1, "boot"))
    found = figures(record({"amber": [WELL], "birch": [WELL]}), amber, birch)
    counted = ("shards_fetched", "shards_from_peers", "bootstrap_copies", "shards_refused", "first_step_s")
    assert [found[name] for name in counted] == [3, 1, 1.0, 0, 4.0]


def test_a_run_of_shipped_text_has_no_such_figures() -> None:
    found = figures(record({"amber": [WELL]}), artifacts("amber"))
    assert (found["shards_fetched"], found["bootstrap_copies"], found["first_step_s"]) == (0, None, None)
