"""Costs of units: bytes as the shapes say, seconds by trials."""

from __future__ import annotations

import pytest
from staged_rank import CPU, FIELDS, TOKENS, Case

from p2ptrain.manifest.model import parameter_count
from p2ptrain.train.autofit import Placement, block_s
from p2ptrain.train.memory import STATE_BYTES, pass_bytes
from p2ptrain.train.stages import balanced_cut, stage_model, unit_costs

PLACEMENT = Placement(None, 2)


@pytest.mark.parametrize("architecture", FIELDS)
def test_units_hold_the_state_of_the_whole_model(architecture):
    description = Case(architecture).manifest.model
    costs = unit_costs(description, TOKENS, PLACEMENT, [1.0] * 2)
    assert sum(costs.state_bytes) == STATE_BYTES * parameter_count(description)
    for stage in balanced_cut(costs, [None, None], 4):
        held = sum(costs.state_bytes[block + 1] for block in stage.blocks)
        held += costs.state_bytes[0] * stage.is_first + costs.state_bytes[-1] * stage.is_last
        assert held == STATE_BYTES * stage_model(description, 0, CPU, stage).flat.layout.parameter_count


def test_the_copy_of_a_tied_embedding_has_no_moments():
    plain, tied = (
        unit_costs(Case(tied=tied).manifest.model, TOKENS, PLACEMENT, []).state_bytes for tied in (False, True)
    )
    assert plain[:-1] == tied[:-1]
    assert plain[-1] - tied[-1] == 8 * 256 * 32


def test_activations_of_all_units_are_those_of_a_pass():
    description = Case().manifest.model
    costs = unit_costs(description, TOKENS, PLACEMENT, [])
    assert sum(costs.activation_bytes) == pass_bytes(description, TOKENS, 2)
    recomputed = unit_costs(description, TOKENS, Placement(None, 2, recomputes=True), []).activation_bytes
    assert recomputed[1] < costs.activation_bytes[1]


def test_units_take_time_as_they_have_weights():
    description = Case().manifest.model
    (seconds,) = unit_costs(description, TOKENS, PLACEMENT, [3.0]).seconds
    assert seconds[0] == 0
    assert len(set(seconds[1:-1])) == 1
    assert seconds[1] + seconds[-1] == pytest.approx(3.0)
    assert block_s(description, TOKENS, PLACEMENT, CPU) > 0
