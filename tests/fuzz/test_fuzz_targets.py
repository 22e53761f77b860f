"""Decoders of untrusted bytes without a search: seeds, saved findings, and random damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
from fuzz_targets import services, targets
from fuzz_targets.common import said
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from p2ptrain import framing

TARGETS = targets()
FOUND = Path(__file__).parent / "found"
"""Folder with one folder per target and one file per input that showed a fault."""

TALKS = {
    name: target.seeds
    for name, target in services.targets().items()
    if target.seeds[0][:2] == bytes([framing.MAGIC, framing.FrameKind.MESSAGE])
}
"""Targets that accept lists of words, with accepted lists."""
VALUES = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(2**63), 2**64 - 1)
    | some.floats()
    | some.text(max_size=20)
    | some.binary(max_size=80),
    lambda inner: some.lists(inner, max_size=5),
    max_leaves=10,
)
"""Any value that a word may be replaced with."""

each_target = pytest.mark.parametrize("name", TARGETS)


@each_target
def test_its_seeds_are_taken(name: str) -> None:
    """Check the seeds: a search from rejected ones would find little."""
    assert [TARGETS[name].check(seed) for seed in TARGETS[name].seeds] == [True] * len(TARGETS[name].seeds)


@each_target
def test_what_it_takes_and_pieces_of_it(name: str) -> None:
    target = TARGETS[name]
    for seed in target.seeds:
        for length in {0, 1, len(seed) // 2, len(seed) - 1, len(seed)}:
            target.check(seed[:length])
        target.check(seed + b"\0")


@each_target
def test_what_was_found_once(name: str) -> None:
    for path in sorted((FOUND / name).glob("*")):
        TARGETS[name].check(path.read_bytes())


def test_whatever_was_found_belongs_to_a_target() -> None:
    assert {path.name for path in FOUND.glob("*/")} <= set(TARGETS)


@each_target
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=some.data())
def test_damage(name: str, data: some.DataObject) -> None:
    target = TARGETS[name]
    damaged = bytearray(data.draw(some.sampled_from(target.seeds)))
    for _ in range(data.draw(some.integers(1, 4))):
        where = data.draw(some.integers(0, len(damaged)))
        damaged[where : where + data.draw(some.integers(0, 4))] = data.draw(some.binary(max_size=4))
    target.check(bytes(damaged))


@pytest.mark.parametrize("name", TALKS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=some.data())
def test_other_words(name: str, data: some.DataObject) -> None:
    """Check lists with one word replaced: random damage to bytes seldom leaves the rest intact."""
    seed, begin = data.draw(some.sampled_from(TALKS[name])), framing.HEADER_BYTES
    end = begin + framing.decode_header(seed[:begin])[1]
    words: list[Any] = msgpack.unpackb(seed[begin:end])
    within = words
    while True:
        index = data.draw(some.integers(0, len(within) - 1))
        if not isinstance(within[index], list) or not within[index] or data.draw(some.booleans()):
            break
        within = within[index]
    within[index] = data.draw(VALUES)
    TARGETS[name].check(said(words) + seed[end:])


@each_target
@settings(max_examples=30)
@given(raw=some.binary(max_size=400))
def test_any_bytes(name: str, raw: bytes) -> None:
    TARGETS[name].check(raw)


@pytest.mark.parametrize(("decoder", "name"), [("decode_part_end", "part_end"), ("decode_header", "header")])
def test_a_decoder_that_reads_wrongly_is_caught(decoder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(framing, decoder)
    monkeypatch.setattr(framing, decoder, lambda data: (2, *right(data)[1:]))
    with pytest.raises((AssertionError, ValueError)):
        TARGETS[name].check(TARGETS[name].seeds[0])
