"""Names of a peer's devices, and the smaller parts of a team: plans, reports, agreements."""

from __future__ import annotations

import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from p2ptrain.base.errors import DeviceError, TeamError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.manifest import with_changes
from p2ptrain.outer.fragments import layer_slices, stage_starts
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import Placement
from p2ptrain.train.stage_costs import unit_costs
from peer.owner.settings import device_name
from peer.team.agreement import balanced, candidates
from peer.team.compiling import TeamCompilers
from peer.team.devices import check_team, choose_devices
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
    with pytest.raises(DeviceError, match="too few for 3 devices"):
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


def test_replicas_have_one_cut_and_shares_by_their_speed(signed_run):
    manifest, ways = layered(signed_run), [Placement(None, size) for size in (2, 1)]
    block_s = [(2.0, 1.0), (2.0, 1.0), (6.0, 3.0), (6.0, 3.0)]  # of each rank, for both micro-batches
    seconds = [[[0.0, *[each[way]] * 6, 0.0] for each in block_s] for way in range(2)]
    found = balanced(manifest, ways, seconds, [None] * 4, stages=2)
    assert [each.blocks for each in found.stages] == [range(3), range(3, 6)]
    assert (found.placement.micro_batch, found.counts) == (1, (6, 2))
    small = balanced(manifest, ways, seconds, [None] * 4, [0], stages=1)
    assert (small.stages[0].blocks, sum(small.counts)) == (range(6), 8 // small.placement.micro_batch)


def test_the_smallest_card_of_a_stage_limits_it(signed_run):
    manifest, ways = layered(signed_run), [Placement(None, 1)]
    seconds = [[[0.0, *[1.0] * 6, 0.0]] * 4]
    whole = sum(unit_costs(manifest.model, manifest.training.sequence_length, ways[0], seconds[0]).state_bytes)
    found = balanced(manifest, ways, seconds, [None, None, None, whole // 3], stages=2)
    assert len(found.stages[1].blocks) < 3
    with pytest.raises(DeviceError, match="No cut of the run's model into 2 stages"):
        balanced(manifest, ways, seconds, [100, None, None, None], stages=2)


def test_the_runs_own_cut_is_named_where_another_would_fit(signed_run):
    manifest, ways = layered(signed_run, fragments=2), [Placement(None, 1)]
    seconds = [[[0.0, *[1.0] * 6, 0.0]] * 2]
    recomputed = unit_costs(manifest.model, manifest.training.sequence_length, Placement(None, 1, True), seconds[0])
    first = sum(recomputed.state_bytes[:2]) + 2 * sum(recomputed.activation_bytes[:2])  # one block
    with pytest.raises(DeviceError, match="2 fragments does; a cut at other layers would fit"):
        balanced(manifest, ways, seconds, [first, None])
    assert len(balanced(layered(signed_run), ways, seconds, [first, None]).stages[0].blocks) == 1


CPU = torch.device("cpu")


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
    assert str(check_team(layered(signed_run), [CPU] * devices, stages, 1e12)) == expected


@pytest.mark.parametrize(
    ("devices", "stages", "changes", "says"),
    [
        (4, 3, {}, "3 stages do not divide 4 devices. Choose the number of stages among 1, 2, 4."),
        (1, 2, {}, "2 stages do not divide 1 device. Choose the number of stages among 1."),
        (8, 8, {}, "The run's model has 6 layers, too few for 8 stages. Choose the number of stages among 1, 2, 4."),
        (4, 4, {"outer.fragments": 2}, "2 fragments begin with 2 of the model's layers, too few for 4 stages."),
        (9, None, {}, "The run's inner steps have 8 sequences, too few for a team of 9 devices. Use at most 8."),
        (2, 2, {"outer.cut": "even"}, "(outer.cut is 'even'), too few for 2 stages."),
    ],
)
def test_stages_that_cannot_train_the_run_are_one_error(signed_run, devices, stages, changes, says):
    with pytest.raises(DeviceError) as caught:
        check_team(with_changes(layered(signed_run), changes), [CPU] * devices, stages, 1e12)
    assert says in f"{caught.value.problem} {caught.value.remedy}"


def test_a_team_on_several_computers_has_stages_alone(signed_run):
    assert str(check_team(layered(signed_run), [CPU], None, 1e12, others=2)) == "3 stages"
    with pytest.raises(DeviceError, match="as many stages as devices"):
        check_team(layered(signed_run), [CPU], 1, 1e12, others=2)
    with pytest.raises(DeviceError, match="too few for a team of 7 devices"):
        check_team(layered(signed_run), [CPU], None, 1e12, others=6)


def test_a_run_that_is_cut_within_layers_trains_on_replicas(signed_run):
    run = with_changes(layered(signed_run), {"outer.cut": "even"})
    assert str(check_team(run, [CPU] * 2, None, 1e12)) == "2 replicas of 1 stage"


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

    def start(rank, program, *is_eager):
        monkeypatch.setattr("peer.team.processes.launched", lambda *command: [sys.executable, "-c", program])
        started.append(RankProcess(tmp_path, rank, "cpu", *is_eager))
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


COMPILES = """print('{"kind":"compiler","reason":"compiling"}', flush=True)"""
EAGER = """print('{"kind":"eager","reason":"no memory"}', flush=True)"""


def test_the_leader_shows_what_the_ranks_compilers_do_and_notes_a_failure(rank_running):
    notes = MemoryLog(10)
    compilers = TeamCompilers("on", None, notes)
    assert compilers.state == ""
    rank = rank_running(1, f"{COMPILES}; {EAGER}; {MEMORY}", partial(compilers.note_eager, 1))
    assert rank.wait(time.monotonic() + 30)
    rank._thread.join()
    assert rank.last_report().kind == "memory"  # the others are not reasons to end
    assert rank.compiler == "compiling"
    assert list(notes.notes) == [("not compiled", {"why": "rank 1: no memory"})]
    compilers._own, compilers._ranks = SimpleNamespace(state="compiled code"), [rank]
    assert compilers.state == "rank 0: compiled code; rank 1: compiling"
    compilers._own.state = "compiling"
    assert compilers.state == "compiling"


def test_a_rank_that_does_not_start_is_an_error_in_time(rank_running):
    with pytest.raises(TeamError, match="ended at its start"):
        rank_running(1, "").wait_ready(30)
    with pytest.raises(TeamError, match="did not start"):
        rank_running(1, SLEEPS).wait_ready(0.2)
    noise = rank_running(1, f"print('x' * {3 * LONGEST_LINE})")
    with pytest.raises(TeamError, match="ended at its start"):
        noise.wait_ready(30)
