"""1F1B: every stage computes all micro-batches, keeps no more than its warm-up, and no stages wait for each other."""

from collections import deque

import pytest

from p2ptrain.train.pipeline_schedule import computations, warm_up

WAYS = pytest.mark.parametrize("is_eager", [False, True])
SIZES = [(stages, micro_batches) for stages in (1, 2, 3, 5) for micro_batches in (stages, stages + 1, 3 * stages + 2)]


def played(stages: int, micro_batches: int, is_eager: bool, travels: int) -> int:
    """Return the ticks of a step in which a computation takes one and a tensor travels for ``travels``."""
    left = [
        deque(computations(warm_up(stage, stages, micro_batches, is_eager), micro_batches)) for stage in range(stages)
    ]
    arrives = {("forward", 0, index): 0 for index in range(micro_batches)}
    arrives |= {("backward", stages - 1, index): 0 for index in range(micro_batches)}
    now = 0
    while any(left):
        assert now < 1000, "the stages wait for each other"
        for stage, own in enumerate(left):
            if own and arrives.get((own[0][0], stage, own[0][1]), now + 1) <= now:
                what, index = own.popleft()
                arrives.setdefault((what, stage + (1 if what == "forward" else -1), index), now + 1 + travels)
        now += 1
    return now


@WAYS
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_each_micro_batch_is_computed_forward_and_then_backward_in_order(stages, micro_batches, is_eager):
    for stage in range(stages):
        first = warm_up(stage, stages, micro_batches, is_eager)
        found = list(computations(first, micro_batches))
        for what in ("forward", "backward"):
            assert [index for each, index in found if each == what] == list(range(micro_batches))
        kept, most = 0, 0
        for what, index in found:
            kept += 1 if what == "forward" else -1
            most = max(most, kept)
            assert what == "forward" or found.index(("forward", index)) < found.index((what, index))
        assert most == first
        assert first == min(micro_batches, (2 * (stages - stage) - 1) if is_eager else stages - stage)


@WAYS
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_stages_that_compute_equally_fast_wait_only_to_begin_and_to_end(stages, micro_batches, is_eager):
    assert played(stages, micro_batches, is_eager, 0) == 2 * (micro_batches + stages - 1)


def test_tensors_that_travel_as_long_as_a_computation_delay_only_the_schedule_that_is_not_eager():
    fills = 2 * (2 * 4 - 1)  # four stages with three tensors between them, forward and backward
    assert played(4, 20, True, 1) <= fills + 2 * 20
    assert played(4, 20, False, 1) > 1.3 * (fills + 2 * 20)
