"""Recorded passes, with doubles of a card's graphs: they compute what the eager pass computes, or it goes on alone."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from p2ptrain.train import accelerator, graphed_pass, inner
from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.graphed_pass import WARM_UPS, GraphedPass
from p2ptrain.train.pass_choice import PAIRS, PassChoice


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
    ticks = map(float, range(1000))
    recorded = GraphedPass(task._eager_pass, task._gradient, task.micro_batch, 17, record)
    candidates = {"a CUDA graph": recorded}
    task.passes = PassChoice(candidates, lambda way, ratio: ratios.append(ratio), failures.append, lambda: next(ticks))


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
        task.offer_graph(lambda way, ratio: None, lambda why: None)
    scaled = tiny_run().task(autocast=torch.float16)
    monkeypatch.setattr(type(scaled), "theta", SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(CompiledPassError, match="dynamic in fp16"):
        scaled.offer_graph(lambda way, ratio: None, lambda why: None)


@pytest.mark.parametrize(("free", "fits"), [(2000, False), (2500, True), (None, False)])
def test_a_card_records_only_if_activations_fit_twice(tiny_run, monkeypatch, free, fits):
    """Use a peak of 1,400 bytes, of which 400 are weights, gradient and moments; a fifth of what is free is kept so."""
    task = tiny_run().task()
    monkeypatch.setattr(type(task), "theta", SimpleNamespace(device=torch.device("cuda:0"), nbytes=100))
    monkeypatch.setattr(accelerator, "free_bytes", lambda device: free)
    monkeypatch.setattr(accelerator, "peak_bytes", lambda device: 1400)
    with contextlib.nullcontext() if fits else pytest.raises(CompiledPassError, match="memory is short"):
        task.offer_graph(lambda way, ratio: None, lambda why: None)
    assert (task.passes is not None) == fits


def test_a_card_compares_a_library_and_its_graph_with_the_eager_pass(tiny_run, tmp_path, monkeypatch):
    tiny, card = tiny_run(), Card()
    eager, task = tiny.task(), tiny.task()
    decisions, made = [], []

    class Library:
        """Stands for a compiled pass: computes eagerly."""

        def __init__(self, library, model, gradient, shape):
            made.append(library)

        def takes(self, part):
            return True

        def run(self, part):
            return task._eager_pass(part)

    def recorded(compute):
        return GraphedPass(compute, task._gradient, task.micro_batch, 17, card.record)

    monkeypatch.setattr(inner, "CompiledPass", Library)
    task._recorded = recorded
    ticks = iter(range(10**6))
    monkeypatch.setattr(inner.time, "perf_counter", lambda: float(next(ticks)))
    task.offer(tmp_path / "pass.so", None, lambda *what: decisions.append(what), lambda why: None)
    steps = 3 * (PAIRS + 1)
    assert run(task, steps) == run(eager, steps)
    assert torch.equal(task.theta, eager.theta)
    assert (made, card.replays) == ([tmp_path / "pass.so"], PAIRS + 1)
    assert decisions == [("compiled code", None)]
