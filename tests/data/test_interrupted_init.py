"""An init that is stopped anywhere goes on, and ends with the same shards as one that is not."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from p2ptrain.base.errors import CorpusError, HomeError, UserError
from p2ptrain.data import shard_text, tokenizing
from p2ptrain.data.own_text import Wanted, create
from p2ptrain.data.sources import InterruptedCorpusError
from p2ptrain.data.unfinished import Unfinished
from p2ptrain.tokens import index, writing
from p2ptrain.tokens.store import ShardStore
from tests.data.building import Built, opened
from tests.data.building import build as build_any
from tests.data.dialogues import made, write_jsonl

STOPPED = KeyboardInterrupt


def build(run: Path, *corpora: Path, **wanted: Any) -> Built:
    return build_any(run, *corpora, **{"held_out": 0.1, **wanted})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (index, writing, shard_text):
        monkeypatch.setattr(module, "SHARD_BYTES", 4_096)
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 700)
    calls = itertools.count(1)
    monkeypatch.setattr(Unfinished, "is_due", property(lambda self: next(calls) % 2 == 0))


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """A folder of text, packed jsonl and parquet, some rows longer than a batch and some without text."""
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(f"Zeile {number}, für alle.\n" for number in range(400)))
    (folder / "b.txt").write_text("\ufeff" + "読む本 " * 1_500)
    rows = [{"text": f"row {number} " * (1 + 40 * (number % 9 == 0))} for number in range(300)]
    lines = [json.dumps(row) for row in rows]
    lines[50:50] = ["no json", '{"other": 1}']
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=40)
    return [folder, tmp_path / "rows.jsonl.gz", tmp_path / "rows.parquet"]


def until_done(again: Callable[[Callable[[int, float], None]], Built], stops: random.Random) -> tuple[Built, int]:
    """Run an init that is stopped at random until it ends; return it and how often it was stopped."""
    for stopped in range(1000):
        left = stops.randint(2, 12)

        def tell(tokens: int, share: float, left: list[int] = [left]) -> None:  # noqa: B006
            left[0] -= 1
            if not left[0]:
                raise STOPPED

        try:
            return again(tell), stopped
        except STOPPED:
            continue
    raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", range(3))
def test_the_root_is_the_same_however_often_it_was_stopped(tmp_path: Path, texts: list[Path], seed: int) -> None:
    whole = build(tmp_path / "whole", *texts)
    run = tmp_path / "stopped"
    found, stopped = until_done(lambda tell: build(run, *texts, tell=tell), random.Random(seed))
    assert stopped > 0
    assert found.index.root == whole.index.root
    assert found.summary == whole.summary
    assert (found.summary.counts.skipped, found.summary.counts.rows) == (2, 602)
    assert found.index.training_shards > 5
    assert sorted(each.name for each in run.iterdir()) == ["files", "manifest.toml", "run.key", "shards", "text.json"]


def test_dialogues_go_on_too(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "one.jsonl", made(200))
    write_jsonl(tmp_path / "folder" / "two.jsonl", made(100))
    write_jsonl(tmp_path / "more.jsonl", made(150))
    sources = [tmp_path / "folder", tmp_path / "more.jsonl"]
    wanted = {"sequence_length": 128}
    whole = build(tmp_path / "whole", *sources, **wanted)
    run = tmp_path / "run"
    found, stopped = until_done(lambda tell: build(run, *sources, **wanted, tell=tell), random.Random(1))
    assert stopped > 0
    assert found.index.root == whole.index.root
    assert found.summary == whole.summary
    assert found.summary.counts.documents == 450


def test_the_root_does_not_depend_on_place_or_time(tmp_path: Path, texts: list[Path]) -> None:
    here = build(tmp_path / "here", *texts)
    (tmp_path / "elsewhere").mkdir()
    moved = [path.rename(tmp_path / "elsewhere" / path.name) for path in texts]
    assert build(tmp_path / "there", *moved).index.root == here.index.root


def test_a_stopped_init_reads_on_from_its_state(
    tmp_path: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that shards that were written before are not written again."""
    written: list[str] = []
    add = ShardStore.add

    def counting(self: ShardStore, digest: str, data: bytes) -> None:
        written.append(digest)
        add(self, digest, data)

    monkeypatch.setattr(ShardStore, "add", counting)

    def stop(tokens: int, share: float) -> None:
        if tokens > 15_000:
            raise STOPPED

    with pytest.raises(STOPPED):
        build(tmp_path / "run", *texts, tell=stop)
    assert len(written) >= 4
    with pytest.raises(UserError, match=r"holds no manifest\.toml"):
        opened(tmp_path / "run")
    told: list[int] = []
    build(tmp_path / "run", *texts, tell=lambda tokens, share: told.append(tokens))
    assert told[0] > 8_000
    assert len(written) == len({*written})


def test_the_hub_may_fail_midway(tmp_path: Path, texts: list[Path]) -> None:
    def fail(tokens: int, share: float) -> None:
        if tokens > 10_000:
            raise InterruptedCorpusError("The hub stops.", "Start again.")

    with pytest.raises(InterruptedCorpusError):
        build(tmp_path / "run", *texts, tell=fail)
    assert (tmp_path / "run" / "unfinished" / "state").exists()
    assert build(tmp_path / "run", *texts).index.root == build(tmp_path / "whole", *texts).index.root


def stop(tokens: int, share: float) -> None:
    if tokens > 10_000:
        raise STOPPED


@pytest.mark.parametrize("change", ["shards", "state"])
def test_what_was_damaged_begins_anew(tmp_path: Path, texts: list[Path], change: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(STOPPED):
        build(run, *texts, tell=stop)
    if change == "shards":
        next(path for path in (run / "shards").rglob("*") if path.is_file()).unlink()
    elif change == "state":
        (run / "unfinished" / "state").write_bytes(b"{")
    told: list[int] = []
    found = build(run, *texts, tell=lambda tokens, share: told.append(tokens))
    assert told[0] < 3_000
    assert found.index.root == build(tmp_path / "whole", *texts).index.root


@pytest.mark.parametrize("change", ["the text", "--held-out", "--preset", "no text"])
def test_another_init_does_not_delete_a_stopped_one(tmp_path: Path, texts: list[Path], change: str) -> None:
    run, content = tmp_path / "run", (texts[0] / "a.txt").read_text()
    state = (texts[0] / "a.txt").stat()
    with pytest.raises(STOPPED):
        build(run, *texts, tell=stop)
    if change == "the text":
        (texts[0] / "a.txt").write_text("Another text.\n" * 800)
    wanted = {"--held-out": {"held_out": 0.2}, "--preset": {"preset": None}}.get(change, {})
    again = (lambda: create(run, Wanted(), stop)) if change == "no text" else (lambda: build(run, *texts, **wanted))
    with pytest.raises(HomeError, match="was stopped, which differs in ") as caught:
        again()
    assert change == "no text" or change in caught.value.problem
    assert "unfinished" in caught.value.remedy
    (texts[0] / "a.txt").write_text(content)
    os.utime(texts[0] / "a.txt", ns=(state.st_atime_ns, state.st_mtime_ns))
    told: list[int] = []
    build(run, *texts, tell=lambda tokens, share: told.append(tokens))
    assert told[0] > 8_000


def test_bad_input_leaves_nothing_of_a_stopped_init(tmp_path: Path, texts: list[Path]) -> None:
    (texts[0] / "z.txt").write_bytes(b"good\n" * 3_000 + b"\xff")

    def stop(tokens: int, share: float) -> None:
        if tokens > 10_000:
            raise STOPPED

    with pytest.raises(STOPPED):
        build(tmp_path / "run", *texts, tell=stop)
    (tmp_path / "run" / "mine").write_text("a note of its author")
    with pytest.raises(CorpusError, match=r"z\.txt is not UTF-8"):
        build(tmp_path / "run", *texts)
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["mine"]


def test_shards_that_were_there_before_stay(tmp_path: Path) -> None:
    (tmp_path / "run" / "shards" / "ab").mkdir(parents=True)
    Unfinished(tmp_path / "run", {}).forget(is_all=True)
    assert (tmp_path / "run" / "shards" / "ab").exists()
