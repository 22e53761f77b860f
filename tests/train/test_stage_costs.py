"""Costs of units: bytes as the shapes say, seconds by trials."""

from __future__ import annotations

import pytest
from staged_rank import BLOCKS, CPU, FIELDS, TOKENS, Case

from p2ptrain.manifest.model import parameter_count
from p2ptrain.train import stage_costs
from p2ptrain.train.activations import pass_bytes
from p2ptrain.train.autofit import Placement
from p2ptrain.train.stage_costs import STATE_BYTES, trials, unit_costs, unit_seconds
from p2ptrain.train.stages import balanced_cut, stage_model

PLACEMENT = Placement(None, 2)


@pytest.mark.parametrize("architecture", FIELDS)
def test_units_hold_the_state_of_the_whole_model(architecture):
    description = Case(architecture).manifest.model
    costs = unit_costs(description, TOKENS, PLACEMENT, [[1.0] * (BLOCKS + 2)] * 2)
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


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_unit_takes_time(architecture, tied):
    description = Case(architecture, tied=tied).manifest.model
    seconds = unit_seconds(description, TOKENS, PLACEMENT, CPU)
    assert len(seconds) == BLOCKS + 2
    assert seconds[0] == 0 <= seconds[-1]
    assert len(set(seconds[1:-1])) == 1
    assert seconds[1] > 0


def test_a_block_is_half_of_what_two_more_blocks_take(monkeypatch):
    def seconds(model, placement, sequence_length):
        assert (placement, sequence_length) == (PLACEMENT, TOKENS)
        return 5.0 + 2.0 * model.module.config.num_hidden_layers

    monkeypatch.setattr(stage_costs, "trial_s", seconds)
    assert unit_seconds(Case().manifest.model, TOKENS, PLACEMENT, CPU) == [0.0, *[2.0] * BLOCKS, 5.0]


def test_placements_whose_trials_are_the_same_share_one(monkeypatch):
    tried = []

    def seconds(description, length, placement, device):
        tried.append(placement)
        return [float(placement.micro_batch), 3.0 * placement.micro_batch]

    monkeypatch.setattr(stage_costs, "CPU_TRIAL_TOKENS", 2 * TOKENS)
    monkeypatch.setattr(stage_costs, "unit_seconds", seconds)
    found = trials(Case().manifest.model, TOKENS, [Placement(None, size) for size in (8, 4, 2, 1)], CPU)
    assert tried == [Placement(None, 2), Placement(None, 1)]
    assert found == [[8.0, 24.0], [4.0, 12.0], [2.0, 6.0], [1.0, 3.0]]
