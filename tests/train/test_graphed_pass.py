"""Recorded passes, with doubles of a card's graphs: they compute what the eager pass computes, or it goes on alone."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.train import graphed_pass
from p2ptrain.train.compiled_pass import PAIRS, CompiledPassError, PassChoice
from p2ptrain.train.compiling import BackgroundCompiler
from p2ptrain.train.graphed_pass import WARM_UPS, GraphedPass


class Card:
    """What ``record`` uses of ``torch.cuda``, on the host; ``work`` runs once more for a recording than on a card."""

    def __init__(self) -> None:
        self.work = None
        self.replays = 0

    def record(self, work):
        for _ in range(WARM_UPS + 1):
            work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def run(task, steps):
    return [task.inner_step(float(step)).loss for step in range(steps)]


def with_graph(task, record, ratios, failures):
    ticks = iter(range(1000))
    recorded = GraphedPass(task._eager_pass, task._gradient, task.micro_batch, 17, record)
    task.passes = PassChoice(recorded, ratios.append, failures.append, lambda: float(next(ticks)))


def test_a_recorded_pass_computes_what_the_eager_one_does(tiny_run):
    tiny, card = tiny_run(), Card()
    eager, task = tiny.task(micro_batch=2), tiny.task(micro_batch=2)
    ratios, failures = [], []
    with_graph(task, card.record, ratios, failures)
    assert run(task, PAIRS + 3) == run(eager, PAIRS + 3)
    assert torch.equal(task.theta, eager.theta)
    assert card.replays == PAIRS + 1
    assert (ratios, failures) == ([None], [])


@pytest.mark.parametrize("after", [0, 2])
def test_what_cannot_be_recorded_leaves_the_step_to_the_eager_pass(tiny_run, after):
    def record(work):
        for _ in range(after):
            work()
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")

    tiny = tiny_run()
    eager, task = tiny.task(micro_batch=2), tiny.task(micro_batch=2)
    ratios, failures = [], []
    with_graph(task, record, ratios, failures)
    assert run(task, 4) == run(eager, 4)
    assert failures == ["operation not permitted when stream is capturing"]


def test_a_card_warms_up_on_a_stream_of_its_own_before_it_records(monkeypatch):
    said = []

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def within(what):
        said.append(f"in {what.name}")
        yield
        said.append(f"out of {what.name}")

    main, graph = Stream("main"), SimpleNamespace(name="graph", replay=lambda: said.append("replay"))
    double = SimpleNamespace(
        Stream=Stream, current_stream=lambda: main, stream=within, graph=within, CUDAGraph=lambda: graph
    )
    monkeypatch.setattr(graphed_pass.torch, "cuda", double)
    graphed_pass.record(lambda: said.append("work"))()
    warm = ["side waits for main", "in side", *["work"] * WARM_UPS, "out of side", "main waits for side"]
    assert said == [*warm, "in graph", "work", "out of graph", "replay"]


def test_only_cuda_cards_record_and_none_in_fp16(tiny_run, monkeypatch):
    task = tiny_run().task()
    with pytest.raises(CompiledPassError, match="only CUDA cards record passes, and this one is on cpu"):
        task.offer_graph(lambda ratio: None, lambda why: None)
    scaled = tiny_run().task(autocast=torch.float16)
    monkeypatch.setattr(type(scaled), "theta", SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(CompiledPassError, match="dynamic in fp16"):
        scaled.offer_graph(lambda ratio: None, lambda why: None)


@pytest.mark.parametrize(
    ("mode", "state"), [("on", "comparing"), ("auto", "off (only passes on the CPU are compiled,")]
)
def test_a_card_records_only_if_its_owner_asks_for_it(tiny_run, tmp_path, monkeypatch, mode, state):
    tiny = tiny_run()
    task = tiny.task()
    monkeypatch.setattr(type(task), "theta", SimpleNamespace(device=torch.device("cuda")))
    log = MemoryLog()
    compiler = BackgroundCompiler(task, tiny.manifest.model, mode, tmp_path, log)
    assert compiler.state.startswith(state)
    assert (task.passes is None) == (mode == "auto")
