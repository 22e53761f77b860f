"""Fragments cover the vector exactly, and equally on every peer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.base.errors import ManifestError
from p2ptrain.outer.fragments import slices


@settings(max_examples=50, deadline=None)
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
