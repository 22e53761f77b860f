"""Present and missing devices, and the number of sequences that fit."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import preset
from p2ptrain.train import autofit
from p2ptrain.train.autofit import (
    Placement,
    choose_device,
    cpu_micro_batch,
    fastest,
    fitting,
    place,
    search_micro_batch,
)


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(autofit, "_compute", lambda device: None)


def failing(*cards):
    """Fail like ``_compute`` on a card on which nothing runs."""

    def compute(device):
        if device.index in cards:
            raise RuntimeError(
                "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors"
            )

    return compute


def test_without_a_card_auto_is_the_cpu(no_cuda):
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("proposal", "index"),
    [("auto", 0), ("cuda", 0), ("cuda:1", 1)],
)
def test_with_cards(two_cards, proposal, index):
    assert choose_device(proposal) == torch.device("cuda", index)
    assert choose_device("cpu") == torch.device("cpu")


def test_the_chosen_card_is_the_current_one(two_cards, monkeypatch):
    """Check the current device: autocast uses it, wherever the tensors are."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    choose_device("cuda:1")
    choose_device("cpu")
    assert chosen == [torch.device("cuda", 1)]


def test_auto_takes_a_card_that_computes(two_cards, monkeypatch):
    said = []
    monkeypatch.setattr(autofit.logger, "warning", lambda text, *words: said.append(text % words))
    monkeypatch.setattr(autofit, "_compute", failing(0))
    assert choose_device("auto") == torch.device("cuda", 1)
    assert len(said) == 1
    assert said[0].startswith("cuda:0 is not used: CUDA error: no kernel image")
    monkeypatch.setattr(autofit, "_compute", failing(0, 1))
    assert choose_device("auto") == torch.device("cpu")


def test_a_card_that_does_not_compute_is_explained_to_who_wishes_for_it(two_cards, monkeypatch):
    monkeypatch.setattr(autofit, "_compute", failing(1))
    with pytest.raises(DeviceError, match=r"cuda:1 was requested, but nothing runs on it \(CUDA error") as caught:
        choose_device("cuda:1")
    assert "kernel errors" not in caught.value.problem  # one line
    assert "--device cpu" in caught.value.remedy


def test_what_a_card_is_asked_to_compute_runs():
    autofit._compute(torch.device("cpu"))


def test_an_absent_card_is_explained(no_cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="built without CUDA"):
        choose_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(DeviceError, match="driver installed") as caught:
        choose_device("cuda:0")
    assert "--device cpu" in caught.value.remedy


def test_a_card_too_many_is_explained(two_cards):
    with pytest.raises(DeviceError, match=r"cuda:2 was requested, but this machine has 2") as caught:
        choose_device("cuda:2")
    assert "cuda:0, cuda:1" in caught.value.remedy


@pytest.mark.parametrize("proposal", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", "mps"])
def test_a_device_of_no_known_kind_is_refused(no_cuda, proposal):
    with pytest.raises(DeviceError, match="There is no device"):
        choose_device(proposal)


@pytest.mark.parametrize(
    ("most", "budget", "tried", "found"),
    [
        (16, 1000, [1, 2, 4, 8], 8),  # 16 would take 1600
        (16, 10_000, [1, 2, 4, 8, 16], 16),
        (6, 10_000, [1, 2, 4, 6], 6),
        (1, 10_000, [1], 1),
        (16, 100, [1], 1),
    ],
)
def test_the_search_doubles_and_stops_short_of_the_budget(most, budget, tried, found):
    trials = []

    def cost(sequences):
        trials.append(sequences)
        return 100 * sequences

    assert search_micro_batch(most, budget, cost) == found
    assert trials == tried


def test_the_search_survives_running_out_of_memory():
    def cost(sequences):
        if sequences > 4:
            raise torch.OutOfMemoryError("simulated")
        return sequences

    assert search_micro_batch(64, 10**9, cost) == 4


@pytest.mark.parametrize("budget", [50, -1])
def test_nothing_fits(budget):
    with pytest.raises(DeviceError, match="does not fit"):
        search_micro_batch(4, budget, lambda sequences: 100 * sequences)


def test_on_the_cpu_the_demo_is_computed_at_once_and_a_large_model_by_the_sequence(tiny_run):
    demo, large = preset("demo", "ab" * 32), preset("llama-135m", "ab" * 32)
    assert cpu_micro_batch(demo.model, demo.training) == demo.training.sequences_per_step
    assert cpu_micro_batch(large.model, large.training) == 1
    tiny = tiny_run()
    assert place(tiny.model(), tiny.manifest.model, tiny.manifest.training) == Placement(None, 4)


def test_the_trial_finds_gradients_that_are_there_already(tiny_run, monkeypatch):
    """Check a trial with existing gradients: from the second micro-batch on, they add to the step's peak."""
    tiny = tiny_run()
    model = tiny.model()
    size = sum(parameter.nbytes for parameter in model.module.parameters())

    def there(device):
        return sum(parameter.grad.nbytes for parameter in model.module.parameters() if parameter.grad is not None)

    before = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: before.append(there(device)) or before[-1])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: there(device) + 12345)
    assert autofit._activation_bytes(model, 2, 16, None) == 12345
    assert before == [size]
    assert there(None) == 0


BF16, FP32 = Placement(torch.bfloat16, 16), Placement(None, 8)


@pytest.mark.parametrize(("bf16_s", "fp32_s", "found"), [(1.0, 2.0, BF16), (2.0, 0.9, FP32), (2.0, 1.0, BF16)])
def test_the_faster_way_to_compute_is_taken(bf16_s, fp32_s, found):
    """Check seconds per sequence: bf16 launches more kernels, for which a small model waits."""
    assert fastest([BF16, FP32], {BF16: bf16_s, FP32: fp32_s}.__getitem__) == found


def test_ways_are_tried_in_turn_and_not_for_long():
    tried = []

    def trial(how):
        tried.append(how)
        return autofit.TRIALS_S / 100

    fastest([BF16, FP32], trial)
    assert tried == [BF16, FP32] * autofit.TRIALS
    tried.clear()
    fastest([BF16, FP32], lambda how: trial(how) * 100)
    assert tried == [BF16, FP32]


def test_a_way_that_runs_out_of_memory_goes_on_with_less():
    """Check memory that another program has taken meanwhile: a smaller batch may still be the faster way."""

    def trial(how):
        if how.micro_batch > 4:
            raise torch.OutOfMemoryError("simulated")
        return 0.1 if how.autocast else 1.0

    assert fastest([BF16, FP32], trial) == Placement(torch.bfloat16, 4)

    def never(how):
        raise torch.OutOfMemoryError("simulated")

    assert fastest([BF16, FP32], never) == Placement(torch.bfloat16, 2)  # training halves on


def test_where_there_is_no_choice_nothing_is_tried():
    assert fastest([FP32], pytest.fail) == FP32


def test_a_way_by_which_the_model_does_not_fit_is_left_out():
    def micro_batch(way):
        if way is None:
            raise DeviceError("the model does not fit this device", "")
        return 16

    assert fitting((torch.bfloat16, None), micro_batch) == [BF16]
    with pytest.raises(DeviceError, match="does not fit"):
        fitting((None,), micro_batch)


def test_a_trial_leaves_no_gradients(tiny_run, monkeypatch):
    tiny = tiny_run()
    model = tiny.model()
    passes = []
    monkeypatch.setattr(torch.cuda, "synchronize", passes.append)
    assert autofit._trial_s(model, Placement(None, 2), 16) > 0
    assert len(passes) == 2  # the first warms up
    assert all(parameter.grad is None for parameter in model.module.parameters())


@pytest.mark.parametrize(
    ("has_bf16", "half_s", "found"),
    [(True, 1.0, BF16), (True, 9.0, FP32), (False, 1.0, Placement(torch.float16, 16)), (False, 9.0, FP32)],
)
def test_a_card_is_asked_for_both_ways(monkeypatch, has_bf16, half_s, found):
    """Check both placements with fake passes, since real ones need a card. fp16 stands in for bf16 on older cards."""
    described = preset("llama-15m", "ab" * 32)
    half = torch.bfloat16 if has_bf16 else torch.float16
    model = SimpleNamespace(theta=SimpleNamespace(device=SimpleNamespace(type="cuda"), nbytes=100))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20_000, 40_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    bytes_each = {half: 950, None: 1900}
    monkeypatch.setattr(autofit, "_activation_bytes", lambda _, sequences, length, way: sequences * bytes_each[way])
    seconds_each = {half: half_s, None: 2.0}
    monkeypatch.setattr(autofit, "_trial_s", lambda _, how, length: how.micro_batch * seconds_each[how.autocast])
    assert place(model, described.model, described.training) == found
