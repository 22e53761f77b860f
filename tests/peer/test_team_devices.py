"""Names of a peer's devices, and the smaller parts of a team: plans, reports, agreements."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from p2ptrain.base.errors import DeviceError, TeamError
from p2ptrain.manifest import with_changes
from p2ptrain.outer.fragments import layer_slices, stage_starts
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import Placement
from peer.owner.settings import device_name
from peer.team.agreement import balanced, candidates
from peer.team.devices import choose_devices
from peer.team.plan import LONGEST_LINE, decode_plan, decode_report
from peer.team.processes import RankProcess, failed_rank

CARDS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture
def two_cards(monkeypatch):
    """Let this machine have two cards."""
    cards = {"cuda": CARDS}
    chosen = {"cuda": CARDS[0], **{str(each): each for each in CARDS}, "cpu": torch.device("cpu")}
    monkeypatch.setattr(accelerator, "cards", lambda kind: cards.get(kind, []))
    monkeypatch.setattr(accelerator, "choose_device", chosen.__getitem__)


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        ("cuda:1,cuda:0", CARDS[::-1]),
        ("all", CARDS),
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
    ("sequences", "ranks", "most", "expected"),
    [(64, 2, 64, [32, 16, 8, 4]), (64, 2, 4, [4, 2, 1]), (12, 3, 12, [4, 2, 1]), (4, 4, 4, [1])],
)
def test_micro_batches_divide_the_step_into_at_least_as_many_as_ranks(signed_run, sequences, ranks, most, expected):
    manifest = with_changes(signed_run().manifest, {"training.sequences_per_step": sequences, "run.tokens": 10**6})
    assert candidates(manifest, ranks, most) == expected


def test_too_few_sequences_are_one_error(signed_run):
    manifest = with_changes(signed_run().manifest, {"training.sequences_per_step": 2})
    with pytest.raises(DeviceError, match="too few for a pipeline of 3 devices"):
        candidates(manifest, 3, 2)


def layered(signed_run, blocks=6, fragments=8):
    changes = {"model.config.num_hidden_layers": blocks, "outer.cut": "layers", "outer.fragments": fragments}
    return with_changes(signed_run().manifest, {**changes, "training.sequences_per_step": 8})


def test_the_shortest_step_is_chosen_of_full_pipelines_and_large_micro_batches(signed_run):
    manifest, ways = layered(signed_run), [Placement(None, size) for size in (4, 2, 1)]

    def chosen(*block_s):
        seconds = [[[0.0, *[each] * 6, 0.0]] * 2 for each in block_s]
        return balanced(manifest, ways, seconds, [None, None])

    assert chosen(4.0, 2.0, 1.0).placement.micro_batch == 1, "the fullest pipeline, if all are as fast per sequence"
    assert chosen(4.0, 2.4, 1.8).placement.micro_batch == 4
    assert chosen(4.0, 2.2, 1.4).placement.micro_batch == 2
    assert [each.blocks for each in chosen(4.0, 2.0, 1.0).stages] == [range(3), range(3, 6)]


def test_a_slow_rank_gets_few_blocks_a_given_cut_is_kept_and_what_fits_nowhere_is_one_error(signed_run):
    manifest, ways = layered(signed_run), [Placement(None, 1)]
    seconds = [[[0.0, *[1.0] * 6, 0.0], [0.0, *[5.0] * 6, 0.0]]]
    assert [each.blocks for each in balanced(manifest, ways, seconds, [None, None]).stages] == [range(5), range(5, 6)]
    kept = balanced(manifest, ways, seconds, [None, None], [0, 2])
    assert [each.blocks for each in kept.stages] == [range(2), range(2, 6)]
    with pytest.raises(DeviceError, match="No cut of the run's model into 2 stages"):
        balanced(manifest, ways, seconds, [100, 100])


def test_a_cut_begins_where_fragments_do(signed_run):
    manifest = layered(signed_run, fragments=2)
    units = manifest.model.unit_parameters()
    starts = stage_starts(units, layer_slices(units, 2))
    found = balanced(manifest, [Placement(None, 1)], [[[0.0, *[1.0] * 6, 0.0], [0.0, *[9.0] * 6, 0.0]]], [None, None])
    assert found.stages[1].blocks.start + 1 in starts


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b'{"kind":"ready","more":1}', b"\xff", b'{"kind":"other"}'])
def test_invalid_lines_are_no_plan_and_no_report(line):
    assert decode_report(line) is None
    with pytest.raises(TeamError, match="plan"):
        decode_plan(line)


@pytest.fixture
def rank_running(monkeypatch, tmp_path):
    """Return a function that starts a rank process with another program."""
    started = []

    def start(rank, program):
        monkeypatch.setattr("peer.team.processes.launched", lambda *command: [sys.executable, "-c", program])
        started.append(RankProcess(tmp_path, rank, "cpu"))
        return started[-1]

    monkeypatch.setattr("peer.team.processes.FINAL_REPORT_S", 1.0)
    yield start
    for each in started:
        each.kill()


SLEEPS = "import time; time.sleep(60)"
HEARD = """print('{"kind":"team","reason":"another rank is gone"}')"""
MEMORY = """print('{"kind":"memory","reason":"no room"}')"""
DIES = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("programs", "rank", "why"),
    [
        ((HEARD, DIES), 2, "was ended by signal 9"),
        ((HEARD, SLEEPS), 2, "does not answer"),
        ((DIES,), 1, "was ended by signal 9"),
        ((SLEEPS,), 1, "does not answer"),
        ((MEMORY, HEARD), 1, "no room"),
        ((HEARD, HEARD), None, ""),
    ],
)
def test_of_several_ranks_the_one_that_failed_is_found(rank_running, programs, rank, why):
    found, said, _ = failed_rank([rank_running(number, each) for number, each in enumerate(programs, 1)])
    assert (None if found is None else found.rank) == rank
    assert why in said


ALIVE = """print('{"kind":"alive"}', flush=True)"""


def test_a_rank_that_falls_silent_is_ended_and_found(rank_running, monkeypatch):
    monkeypatch.setattr("peer.team.processes.LISTENING_S", 0.1)
    living = f"import time\nwhile True:\n {ALIVE}\n time.sleep(0.2)"
    frozen, well, still_starting = (
        rank_running(number, program) for number, program in enumerate((f"{ALIVE}; {SLEEPS}", living, SLEEPS), 1)
    )
    assert frozen.wait(time.monotonic() + 30)
    assert not well.has_ended
    assert not still_starting.has_ended
    well.kill()
    found, said, _ = failed_rank([frozen])
    assert found is frozen
    assert "gave no sign of life for" in said


def test_a_rank_that_does_not_start_is_an_error_in_time(rank_running):
    began = time.monotonic()
    with pytest.raises(TeamError, match="ended at its start"):
        rank_running(1, "").wait_ready(30)
    with pytest.raises(TeamError, match="did not start"):
        rank_running(1, SLEEPS).wait_ready(0.2)
    noise = rank_running(1, f"print('x' * {3 * LONGEST_LINE})")
    with pytest.raises(TeamError, match="ended at its start"):
        noise.wait_ready(30)
    assert time.monotonic() - began < 30
