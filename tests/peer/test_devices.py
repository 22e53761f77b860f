"""Names of a peer's devices, the mesh of ranks on them, and what the ranks agree on."""

from __future__ import annotations

import socket

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import with_changes
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import Placement
from p2ptrain.train.stages import unit_costs
from peer.start_options import device_name
from peer.training.agreement import balanced, micro_batch_of
from peer.training.devices import choose_devices, mesh_of, other_ranks
from peer.training.lan_address import check_to_lead

CPU = torch.device("cpu")
CARDS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture
def two_cards(monkeypatch):
    """Let this machine have two cards, on which nothing may run."""
    monkeypatch.setattr(accelerator, "cards", lambda kind: CARDS if kind == "cuda" else [])
    monkeypatch.setattr(accelerator, "_fault", lambda card: pytest.fail(f"a context on {card}"))
    monkeypatch.setattr(accelerator, "_make_current", lambda card: pytest.fail(f"a context on {card}"))


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        ("cuda:1,cuda:0", CARDS[::-1]),
        ("all", CARDS),
        ("auto", CARDS[:1]),
        ("cpu,cuda,cpu", [torch.device("cpu"), CARDS[0], torch.device("cpu")]),
    ],
)
def test_devices_keep_their_order(two_cards, names, devices):
    assert choose_devices(names) == devices
    assert device_name(names) == names


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("cuda:0,cuda:0", "named twice"),
        ("cuda,cuda:0", "named twice"),
        ("cuda:0,auto", "lets this machine choose"),
        ("all,cpu", "There is no device"),
        ("cpu,", "There is no device"),
        ("", "There is no device"),
        ("cuda:2", "has 2 CUDA device"),
    ],
)
def test_wrong_names_are_one_error(two_cards, names, says):
    with pytest.raises(DeviceError, match=says):
        choose_devices(names)


def test_all_needs_a_card(monkeypatch):
    monkeypatch.setattr(accelerator, "cards", lambda kind: [])
    with pytest.raises(DeviceError, match="no card"):
        choose_devices("all")


@pytest.mark.parametrize(
    ("sequences", "ranks", "most", "expected"), [(64, 2, 64, 16), (64, 2, 4, 4), (12, 3, 12, 2), (4, 4, 4, 1)]
)
def test_micro_batches_divide_the_step_into_at_least_as_many_as_ranks(signed_run, sequences, ranks, most, expected):
    manifest = with_changes(signed_run().manifest, {"training.sequences_per_step": sequences, "run.tokens": 10**6})
    assert micro_batch_of(manifest, ranks, most) == expected


def layered(signed_run):
    changes = {"model.config.num_hidden_layers": 6, "training.sequences_per_step": 8}
    return with_changes(signed_run().manifest, changes)


ONE = Placement(None, 1)


def test_a_slow_rank_gets_few_blocks_and_what_fits_nowhere_is_one_error(signed_run):
    manifest = layered(signed_run)
    assert [each.blocks for each in balanced(manifest, ONE, [1.0, 5.0], [None, None], 2).stages] == [
        range(5),
        range(5, 6),
    ]
    with pytest.raises(DeviceError, match="No cut of the run's model into 2 stages"):
        balanced(manifest, ONE, [1.0, 5.0], [100, 100], 2)


def test_replicas_have_one_cut_and_shares_by_their_speed(signed_run):
    manifest = layered(signed_run)
    found = balanced(manifest, ONE, [1.0, 1.0, 3.0, 3.0], [None] * 4, stages=2)
    assert found.counts == (6, 2)
    small = balanced(manifest, ONE, [1.0, 1.0, 3.0, 3.0], [None] * 4, stages=1)
    assert (small.stages[0].blocks, sum(small.counts)) == (range(6), 8)


def test_the_smallest_card_of_a_stage_limits_it(signed_run):
    manifest, seconds = layered(signed_run), [1.0] * 4
    free = balanced(manifest, ONE, seconds, [None] * 4, stages=2)
    costs = unit_costs(manifest.model, manifest.training.sequence_length, ONE, seconds)
    whole = sum(costs.state_bytes)
    found = balanced(manifest, ONE, seconds, [None, None, None, whole // 3], stages=2)
    assert len(found.stages[1].blocks) < len(free.stages[1].blocks)
    with pytest.raises(DeviceError, match="No cut of the run's model into 2 stages"):
        balanced(manifest, ONE, seconds, [100, None, None, None], stages=2)


@pytest.mark.parametrize(
    ("devices", "stages", "expected"),
    [
        (2, None, "2 stages"),
        (4, 2, "2 replicas of 2 stages"),
        (4, 1, "4 replicas of 1 stage"),
        (8, None, "2 replicas of 4 stages"),
        (7, None, "7 replicas of 1 stage"),
        (6, 6, "6 stages"),
    ],
)
def test_by_default_there_are_as_many_stages_as_devices_and_layers_allow(signed_run, devices, stages, expected):
    assert str(mesh_of(layered(signed_run), [CPU] * devices, stages, 1e12)) == expected


@pytest.mark.parametrize(
    ("devices", "stages", "changes", "says"),
    [
        (4, 3, {}, "3 stages do not divide 4 devices. Give --stages 1 or 2 or 4."),
        (1, 2, {}, "2 stages do not divide 1 device. Give --stages 1."),
        (8, 8, {}, "The run's model has 6 layers, too few for 8 stages. Give --stages 1 or 2 or 4."),
        (9, None, {}, "The run's inner steps have 8 sequences, too few for 9 devices. Use at most 8."),
    ],
)
def test_stages_that_cannot_train_the_run_are_one_error(signed_run, devices, stages, changes, says):
    with pytest.raises(DeviceError) as caught:
        mesh_of(with_changes(layered(signed_run), changes), [CPU] * devices, stages, 1e12)
    assert says in f"{caught.value.problem} {caught.value.remedy}"


def test_stages_need_devices_of_one_kind(signed_run):
    mixed = [CPU, CARDS[0]]
    assert str(mesh_of(layered(signed_run), mixed, None, 1e12)) == "2 replicas of 1 stage"
    with pytest.raises(DeviceError, match="several kinds cannot exchange activations"):
        mesh_of(layered(signed_run), mixed, 2, 1e12)


def test_other_computers_bring_one_rank_each(signed_run):
    others = other_ranks(3, "192.168.1.5", [CPU])
    assert others == 2
    assert str(mesh_of(layered(signed_run), [CPU], None, 1e12, others)) == "3 stages"
    assert other_ranks(None, None, [CPU]) == 0


@pytest.mark.parametrize(
    ("team", "at", "says"),
    [
        (2, None, "--team and --at belong together"),
        (None, "127.0.0.1", "--team and --at belong together"),
        (2, "127.0.0.1", "--team 2 leaves no place for another computer, since this one has 2 devices"),
    ],
)
def test_unclear_teams_are_one_error(team, at, says):
    with pytest.raises(DeviceError, match=says):
        other_ranks(team, at, [CPU, CPU])


@pytest.mark.parametrize(
    ("at", "says"),
    [
        ("home", "'home' is not an IPv4 address"),
        ("10.0.0.999", "'10.0.0.999' is not an IPv4 address"),
        ("0.0.0.0", "not an address of a private network"),
        ("8.8.8.8", "not an address of a private network"),
        ("10.0.0.1:99999", "99999 is not a TCP port"),
        ("10.255.254.253", "This computer has no address 10.255.254.253"),
    ],
)
def test_addresses_at_which_nobody_can_wait_are_one_error(at, says):
    with pytest.raises(DeviceError, match=says):
        check_to_lead(at)


def test_a_port_that_another_program_has_is_one_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(DeviceError, match=rf"cannot listen on 127.0.0.1:{port}"):
            check_to_lead(f"127.0.0.1:{port}")
    check_to_lead(f"127.0.0.1:{port}")
