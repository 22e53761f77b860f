"""Which units are held out, and how documents are marked."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.data.parts import Parts, Unit
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter
from tests.small_corpus import MemoryStore

PREFIX, END = 1, 2


def divided(
    units: list[Unit], fraction: float = 0.25, most: int = 1_000, marks: bool = True
) -> tuple[list[int], list[int]]:
    """Return the training ids and the held-out ones."""
    store = MemoryStore()
    writer = ShardWriter(store, 4)
    parts = Parts(writer, fraction, most, [PREFIX] * marks, END if marks else None)
    for unit in units:
        parts.add(unit)
    parts.finish()
    index = writer.finish(1)
    return ids_of(store, index, index.training_shards)


def ids_of(store: ShardStore, index: ShardIndex, count: int) -> tuple[list[int], list[int]]:
    shards = [*index.training, *index.held_out]
    read = [store.map(each.digest, 4, each.tokens).tolist() for each in shards]  # type: ignore[union-attr]
    return [*itertools.chain(*read[:count])], [*itertools.chain(*read[count:])]


def unit(number: int, size: int = 1, **fields: object) -> Unit:
    return Unit(np.full(size, number, dtype=np.uint32), **fields)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=150, max_size=400),
    fraction=st.floats(0.02, 0.5),
    most=st.integers(120, 2_000),
)
def test_what_is_held_out_keeps_its_bounds_and_is_nowhere_else(sizes: list[int], fraction: float, most: int) -> None:
    units = [unit(10 + number, size) for number, size in enumerate(sizes)]
    training, held_out = divided(units, fraction, most, marks=False)
    assert sorted(training + held_out) == sorted(id_ for each in units for id_ in each.ids.tolist())
    assert not {*training} & {*held_out}
    assert len(held_out) <= max(1, min(most, fraction * sum(sizes)))


def test_what_is_held_out_of_a_long_text_is_spread_over_all_of_it() -> None:
    numbers = range(10, 10_010)
    _, held_out = divided([unit(number) for number in numbers], 0.1, 300, marks=False)
    assert 150 <= len(held_out) <= 300
    for start in range(10, 10_000, 2_500):
        assert 0.2 < sum(start <= each < start + 2_500 for each in held_out) / len(held_out) < 0.3


def test_every_document_has_its_marks() -> None:
    training, held_out = divided([unit(number, 4) for number in range(10, 20)])
    assert training[:6] == [PREFIX, 10, 10, 10, 10, END]
    assert held_out[:6] == [PREFIX, 13, 13, 13, 13, END]
    assert len(training) + len(held_out) == 60


def test_where_a_document_does_not_go_on_it_ends() -> None:
    """Check pieces of two documents: the fourth one is held out, and the other source goes on in between."""
    pieces = [unit(10 + number, 4, begins=number == 0, ends=number == 5) for number in range(6)]
    other = unit(30, 4, source=1)
    training, held_out = divided([*pieces[:5], other, pieces[5]])
    texts = " ".join(map(str, training)).split(f" {END}")
    assert texts[0].split() == ["1", *["10"] * 4, *["11"] * 4, *["12"] * 4]
    assert texts[1].split() == ["1", *["14"] * 4]
    assert texts[2].split() == ["1", *["30"] * 4]
    assert texts[3].split() == ["1", *["15"] * 4]
    assert held_out == [PREFIX, 13, 13, 13, 13, END]


def test_the_end_of_a_short_text_is_held_out(tmp_path: Path) -> None:
    writer = ShardWriter(ShardStore(tmp_path), 2)
    writer.add(np.arange(100, dtype=np.uint16), is_training=True)
    index = writer.finish(9)
    assert (index.training_tokens, index.held_out_tokens) == (90, 10)


@pytest.mark.parametrize("stop", [3, 40, 77])
def test_parts_go_on_from_a_state(stop: int) -> None:
    units = [unit(10 + number, 1 + number % 7, begins=number % 3 == 0, ends=number % 3 == 2) for number in range(80)]

    def run(stops: list[int]) -> tuple[MemoryStore, ShardIndex]:
        store = MemoryStore()
        writer = ShardWriter(store, 4)
        parts = Parts(writer, 0.3, 60, [PREFIX], END)
        for number, each in enumerate(units):
            if number in stops:
                numbers, arrays = parts.state()
                writer = ShardWriter(store, 4)
                parts = Parts(writer, 0.3, 60, [PREFIX], END)
                parts.resume(numbers, np.concatenate(arrays).astype("<u4"))
            parts.add(each)
        parts.finish()
        return store, writer.finish(1)

    assert run([stop])[1].root == run([])[1].root
