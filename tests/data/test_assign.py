"""Assignment of sequences: a permutation per epoch, a pure function, resumable."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.data import assign

few = settings(max_examples=40)


@few
@given(total=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), peer=st.text(max_size=60))
def test_an_epoch_reads_every_sequence_once(total, seed, peer):
    read = [assign.sequences(seed, peer, step, 1, total)[0] for step in range(2 * total)]
    assert sorted(read[:total]) == list(range(total))
    assert sorted(read[total:]) == list(range(total))


@few
@given(total=st.integers(1, 100), per_step=st.integers(1, 7), steps=st.integers(1, 20))
def test_the_walk_does_not_depend_on_how_it_is_cut_into_steps(total, per_step, steps):
    one_by_one = [assign.sequences(3, "peer", step, 1, total)[0] for step in range(steps * per_step)]
    in_steps = [index for step in range(steps) for index in assign.sequences(3, "peer", step, per_step, total)]
    assert in_steps == one_by_one


def test_the_order_is_fixed_for_all_time():
    # Recorded once. If this changes, a resumed peer reads other sequences than before.
    assert assign.sequences(1, "12D3KooWAlice", 0, 6, 37_504) == [35965, 12137, 4978, 11159, 37028, 16910]


def test_peers_seeds_and_epochs_have_orders_of_their_own():
    total = 1000
    walks = {
        tuple(assign.sequences(seed, peer, step, total, total))
        for seed, peer, step in [(1, "a", 0), (1, "b", 0), (2, "a", 0), (1, "a", 1)]
    }
    assert len(walks) == 4


def test_an_order_looks_random():
    total = 4096
    walk = assign.sequences(7, "peer", 0, total, total)
    fixed = sum(index == place for place, index in enumerate(walk))
    rising = sum(after > before for before, after in itertools.pairwise(walk))
    assert fixed < 10  # the expectation is one
    assert abs(rising / total - 0.5) < 0.05


def test_a_large_corpus_costs_no_memory():
    assert all(0 <= index < 10**12 for index in assign.sequences(1, "peer", 10**9, 4, 10**12))


def test_coverage_grows_to_one():
    assert assign.coverage(0, 4, 100) == 0
    assert assign.coverage(5, 4, 100) == pytest.approx(0.2)
    assert assign.coverage(1000, 4, 100) == 1


@pytest.mark.parametrize(("step", "per_step", "total"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_nonsense_is_refused(step, per_step, total):
    with pytest.raises(ValueError, match="no sequences"):
        assign.sequences(1, "peer", step, per_step, total)


def test_the_module_itself_needs_no_torch():
    source = assign.__file__
    code = f"import runpy, sys; runpy.run_path({source!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("total", [1, 2, 5, 64, 65, 1000, 1025])
def test_a_whole_walk_is_the_places_one_by_one(total):
    walk = assign.whole_walk(3, "alice", 2, total)
    assert walk.tolist() == [
        index for step in range(total) for index in assign.sequences(3, "alice", step + 2 * total, 1, total)
    ]
