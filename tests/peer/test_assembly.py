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

from p2ptrain.base.telemetry import EventLog
from p2ptrain.codec import CodecTerms
from p2ptrain.host.rules import codecs_of, fragments_of, matrices_of
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.identity import Identity
from p2ptrain.train.model import flat_model
from peer import assembly
from peer.assembly import TrainingSession, build
from peer.home import Home
from peer.start_options import PeerOptions


def built(
    home: Home, device: torch.device, signed: SignedManifest, log: EventLog, supply: Any = None
) -> TrainingSession:
    """Return the session of a peer whose trainer has ended again."""
    identity, options = Identity.load_or_create(home.identity), PeerOptions(link=None)

    async def peer() -> TrainingSession:
        async with contextlib.AsyncExitStack() as stack:
            return build(options, [device], home, identity, signed, log, stack, lambda: False, supply)

    return asyncio.run(peer())


def test_a_trainer_asks_for_its_text_and_knows_the_time_that_remains(
    signed_run: Callable[..., SignedManifest], tmp_path: Path
) -> None:
    home, signed = Home(tmp_path / "home"), signed_run()
    home.path.mkdir()
    home.save_manifest(signed)
    supply = SimpleNamespace(is_supplied=lambda step: True, on_supplied=None)
    with contextlib.closing(EventLog(home.events)) as log:
        record = built(home, torch.device("cpu"), signed, log, supply).record
    task = cast(Any, record.task)
    assert task.is_supplied is supply.is_supplied
    assert supply.on_supplied == record.learner.inbox.wake
    assert task.remaining_s == record.remaining_s


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


def test_a_run_that_reads_its_text_many_times_says_so(
    signed_run: Callable[..., SignedManifest], tmp_path: Path
) -> None:
    home, device = Home(tmp_path / "home"), torch.device("cpu")
    home.path.mkdir()
    heard: list[str] = []
    with contextlib.closing(EventLog(home.events)) as log:
        log.listen(lambda kind, fields: heard.append(kind))
        signed = signed_run(run__tokens=30_000_000)
        home.save_manifest(signed)
        built(home, device, signed, log)
    assert heard.count("text repeats") == 1


def test_a_text_is_written_at_one_look_of_four() -> None:
    write = assembly._sampler(cast(Any, SimpleNamespace(sample=lambda new_tokens: "To be")))
    assert [write() for _ in range(8)] == ["", "To be", "", "", "", "To be", "", ""]
