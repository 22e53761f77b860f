"""The decoders of what strangers send, without a search: what they take, what was found once, and damage at random."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_targets import targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from p2ptrain import framing

TARGETS = targets()
FOUND = Path(__file__).parent / "found"
"""One folder a target, one file an input that showed a fault."""

each_target = pytest.mark.parametrize("name", TARGETS)


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
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=some.data())
def test_damage(name: str, data: some.DataObject) -> None:
    target = TARGETS[name]
    damaged = bytearray(data.draw(some.sampled_from(target.seeds)))
    for _ in range(data.draw(some.integers(1, 4))):
        where = data.draw(some.integers(0, len(damaged)))
        damaged[where : where + data.draw(some.integers(0, 4))] = data.draw(some.binary(max_size=4))
    target.check(bytes(damaged))


@each_target
@settings(max_examples=30, deadline=None)
@given(raw=some.binary(max_size=400))
def test_any_bytes(name: str, raw: bytes) -> None:
    TARGETS[name].check(raw)


@pytest.mark.parametrize(("decoder", "name"), [("decode_part_end", "part_end"), ("decode_header", "header")])
def test_a_decoder_that_reads_wrongly_is_caught(decoder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(framing, decoder)
    monkeypatch.setattr(framing, decoder, lambda data: (2, *right(data)[1:]))
    with pytest.raises((AssertionError, ValueError)):
        TARGETS[name].check(TARGETS[name].seeds[0])
