"""Fragments cover the vector exactly, and equally on every peer."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.base.errors import ManifestError
from p2ptrain.outer.fragments import layer_slices, slices


@settings(max_examples=50)
@given(st.integers(1, 500_000), st.integers(1, 64), st.sampled_from([1, 16, 1024]))
def test_slices_cover_exactly_and_are_near_equal(parameter_count: int, fragments: int, align: int) -> None:
    blocks = -(-parameter_count // align)
    if fragments > blocks:
        with pytest.raises(ManifestError, match=f"at most {blocks}"):
            slices(parameter_count, fragments, align)
        return
    cut = slices(parameter_count, fragments, align)
    assert len(cut) == fragments
    assert [i for piece in cut for i in (piece.start, piece.stop)][1:-1:2] == [piece.start for piece in cut[1:]]
    assert (cut[0].start, cut[-1].stop) == (0, parameter_count)
    assert all(piece.start % align == 0 for piece in cut)
    lengths = [-(-(piece.stop - piece.start) // align) for piece in cut]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1


def test_known_cut() -> None:
    assert slices(5000, 2) == (slice(0, 2048), slice(2048, 5000))


@pytest.mark.parametrize("arguments", [(0, 1), (10, 0), (10, 1, 0)])
def test_nonsense_is_our_bug(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        slices(*arguments)


UNITS = st.lists(st.integers(1, 2_000).map(lambda sixteenths: 16 * sixteenths), min_size=1, max_size=12)


@settings(max_examples=200)
@given(UNITS, st.data())
def test_fragments_are_whole_units_or_parts_of_one(units: list[int], data: st.DataObject) -> None:
    parts = sum(-(-unit // 1024) for unit in units)
    fragments = data.draw(st.integers(1, parts))
    cut = layer_slices(units, fragments)
    assert len(cut) == fragments
    assert (cut[0].start, cut[-1].stop) == (0, sum(units))
    assert all(one.stop == other.start and one.start < one.stop for one, other in itertools.pairwise(cut))
    starts = [*itertools.accumulate(units, initial=0)]
    for piece in cut:  # a run of whole units, or a part of one unit
        inside = next(at for at, start in enumerate(starts) if piece.stop <= starts[at + 1])
        whole = piece.start in starts and piece.stop in starts
        assert whole or (starts[inside] <= piece.start and (piece.start - starts[inside]) % 1024 == 0)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_no_cut_at_layers_has_a_shorter_longest_fragment(units: list[int], data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, sum(units)))

    def longest(unit: int, left: int) -> float:
        """Try all cuts of the units from this one on."""
        if unit == len(units):
            return 0 if left == 0 else float("inf")
        runs = [(end, 1, sum(units[unit:end])) for end in range(unit + 1, len(units) + 1)]
        parts = [(unit + 1, count, -(-units[unit] // count)) for count in range(2, units[unit] + 1)]
        tries = [max(length, longest(end, left - count)) for end, count, length in runs + parts if count <= left]
        return min(tries, default=float("inf"))

    cut = layer_slices(units, fragments, align=1)
    assert max(piece.stop - piece.start for piece in cut) == longest(0, fragments)


@pytest.mark.parametrize(
    ("units", "fragments", "lengths"),
    [
        ([4096, 1024, 1024, 1024, 1024], 4, [2048, 2048, 2048, 2048]),
        ([1600] * 10, 4, [3200, 4800, 3200, 4800]),
        ([1600, 1600, 48], 2, [1600, 1648]),
        ([48, 16], 1, [64]),
    ],
)
def test_known_cuts_at_layers(units: list[int], fragments: int, lengths: list[int]) -> None:
    assert [piece.stop - piece.start for piece in layer_slices(units, fragments)] == lengths


def test_more_fragments_than_layers_have_parts_are_refused_by_name() -> None:
    with pytest.raises(ManifestError, match=r'5 fragments are too many for outer\.cut = "layers"') as caught:
        layer_slices([2048, 16, 16], 5)
    assert caught.value.remedy == "Set outer.fragments in the manifest to at most 4."


@pytest.mark.parametrize("arguments", [([], 1), ([16, 0], 1), ([16], 0), ([16], 1, 0)])
def test_nonsense_about_layers_is_our_bug(arguments: tuple[list[int], int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        layer_slices(*arguments)
