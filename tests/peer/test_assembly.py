"""Construction of a peer from its manifest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from p2ptrain.base.telemetry import EventLog, MemoryLog
from p2ptrain.codec import CodecTerms
from p2ptrain.host.rules import codecs_of, fragments_of, matrices_of
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.identity import Identity
from p2ptrain.train.model import flat_model
from peer import assembly
from peer.assembly import PeerOptions, TrainingSession, build, noting_progress
from peer.home import Home


def built(home: Home, device: torch.device, signed: SignedManifest, log: EventLog) -> TrainingSession:
    """Return the session of a peer whose trainer has ended again."""
    identity, options = Identity.load_or_create(home.identity), PeerOptions(link=None)

    async def peer() -> TrainingSession:
        async with contextlib.AsyncExitStack() as stack:
            return build(options, [device], home, identity, signed, log, stack, lambda: False)

    return asyncio.run(peer())


@pytest.mark.parametrize(("fragments", "cut"), [(1, "even"), (3, "even"), (3, "layers")])
def test_low_rank_messages_are_of_the_models_matrices(
    signed_run: Callable[..., SignedManifest], tmp_path: Path, fragments: int, cut: str
) -> None:
    signed = signed_run(
        outer__recipe="swarm_gradients",
        outer__exchanges_per_step=1,
        outer__fragments=fragments,
        outer__cut=cut,
        codec__gradients="lowrank",
        codec__rank=2,
    )
    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.save_manifest(signed)
    device = torch.device("cpu")
    with contextlib.closing(EventLog(home.events)) as log:
        session = built(home, device, signed, log)
    payloads = session.record.learner.payloads

    layout = flat_model(signed.manifest.model, signed.manifest.run.seed, device).layout
    pieces = fragments_of(signed.manifest.outer, layout)
    _, low_rank = codecs_of(signed.manifest.codec)
    sizes = [
        low_rank.encoded_size(CodecTerms(piece.stop - piece.start, matrices=matrices))
        for piece, matrices in zip(pieces, matrices_of(layout, pieces), strict=True)
    ]
    numbers = range(fragments, 2 * fragments)
    assert payloads.encoded_sizes(numbers) == sizes
    assert [len(part) for part in payloads.encode(numbers).parts] == sizes
    assert sizes != [low_rank.encoded_size(CodecTerms(piece.stop - piece.start)) for piece in pieces]


def test_who_makes_tokens_says_so_every_ten_seconds() -> None:
    """Check the progress of tokenization: a testnet takes longer silence for a hang."""
    now, log = 100.0, MemoryLog()
    tell = noting_progress(log, lambda: now)
    for tokens in range(1, 36):
        now += 1.0
        tell(tokens, 50)
    assert list(log.notes) == [("tokenizing", {"tokens": tokens, "most": 50}) for tokens in (10, 20, 30)]


def test_the_first_start_tells_how_far_it_is(
    signed_run: Callable[..., SignedManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "TOKENIZING_PERIOD_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home, device = Home(tmp_path / "home"), torch.device("cpu")
    home.path.mkdir()
    heard: list[str] = []
    with contextlib.closing(EventLog(home.events)) as log:
        log.listen(lambda kind, fields: heard.append(kind))
        signed = signed_run(run__tokens=30_000_000)
        home.save_manifest(signed)
        built(home, device, signed, log)
    assert "tokenizing" in heard
    assert heard.count("text read") == 1
    assert heard.count("text repeats") == 1


def test_a_text_is_written_at_one_look_of_four() -> None:
    write = assembly._sampler(cast(Any, SimpleNamespace(sample=lambda new_tokens: "To be")))
    assert [write() for _ in range(8)] == ["", "To be", "", "", "", "To be", "", ""]
