"""The number of sequences that fit a device, and the type that is faster on it."""

from types import SimpleNamespace

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import preset
from p2ptrain.train import accelerator, autofit
from p2ptrain.train.activations import pass_bytes
from p2ptrain.train.autofit import (
    Placement,
    cpu_placement,
    fastest,
    fitting,
    place,
    search_micro_batch,
)
from tests.train.devices import GB, machine_with, with_memory


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


def test_what_a_pass_takes_anyway_is_not_multiplied():
    """Check 500 bytes beside 100 a sequence: 16 take 2,100, though twice what 8 took would be 2,600."""
    assert search_micro_batch(64, 2200, lambda sequences: 500 + 100 * sequences) == 16


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("simulated"), RuntimeError("MPS backend out of memory")])
def test_the_search_survives_running_out_of_memory(error):
    def cost(sequences):
        if sequences > 4:
            raise error
        return sequences

    assert search_micro_batch(64, 10**9, cost) == 4


def test_errors_of_the_program_are_no_lack_of_memory():
    def broken(*given):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        search_micro_batch(4, 10**9, broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        fastest([BF16, FP32], broken)


@pytest.mark.parametrize("budget", [50, -1])
def test_nothing_fits(budget):
    with pytest.raises(DeviceError, match="does not fit"):
        search_micro_batch(4, budget, lambda sequences: 100 * sequences)


def test_on_the_cpu_the_demo_is_computed_at_once_and_a_large_model_by_the_sequence(tiny_run):
    demo, middle, large = (preset(name, "ab" * 32) for name in ("demo", "llama-15m", "llama-135m"))
    assert cpu_placement(demo.model, demo.training) == Placement(None, demo.training.sequences_per_step)
    assert cpu_placement(middle.model, middle.training) == Placement(None, 8)  # 14 of 16 fit: two equal parts
    one = pass_bytes(large.model, large.training.sequence_length)
    assert cpu_placement(large.model, large.training, one) == Placement(None, 1)
    assert cpu_placement(large.model, large.training, one - 1).recomputes
    assert cpu_placement(large.model, large.training, 1) == Placement(None, 1, recomputes=True)
    tiny = tiny_run()
    assert place(tiny.model(), tiny.manifest.model, tiny.manifest.training) == Placement(None, 4)
    assert place(tiny.model(), tiny.manifest.model, tiny.manifest.training, 1).recomputes


def test_the_trial_finds_gradients_that_are_there_already(tiny_run, monkeypatch):
    """Check a trial with existing gradients: from the second micro-batch on, they add to the step's peak."""
    tiny = tiny_run()
    model = tiny.model()
    size = sum(parameter.nbytes for parameter in model.module.parameters())

    def there(device):
        return sum(parameter.grad.nbytes for parameter in model.module.parameters() if parameter.grad is not None)

    before = []
    monkeypatch.setattr(accelerator, "start_peak", lambda device: before.append(there(device)) or before[-1])
    monkeypatch.setattr(accelerator, "peak_bytes", lambda device: there(device) + 12345)
    waited = []
    monkeypatch.setattr(accelerator, "synchronize", waited.append)
    assert autofit._activation_bytes(model, Placement(None, 2), 16, 14) == 12345
    assert len(waited) == 1  # a device that computes later also runs out of memory later
    assert before == [size]
    assert there(None) == 0
    monkeypatch.setattr(accelerator, "peak_bytes", lambda device: None)
    assert autofit._activation_bytes(model, Placement(None, 2), 16, 14) == 14  # the estimate


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


def test_a_way_that_the_backend_lacks_is_left_out():
    def micro_batch(way):
        if way in lacking:
            raise NotImplementedError("The operator 'aten::_some' is not implemented for MPS\nIf you want")
        return 8

    lacking = {torch.float16}
    assert fitting((torch.float16, None), micro_batch) == [FP32]
    lacking.add(None)
    with pytest.raises(
        DeviceError, match=r"lacks an operation of the model \(The operator 'aten::_some' .* MPS\)"
    ) as caught:
        fitting((torch.float16, None), micro_batch)
    assert "--device" in caught.value.remedy


def test_a_trial_leaves_no_gradients_and_is_short_on_the_cpu(tiny_run, monkeypatch):
    tiny = tiny_run()
    model = tiny.model()
    passes, shapes = [], []
    monkeypatch.setattr(accelerator, "synchronize", passes.append)
    original = autofit.summed_loss
    monkeypatch.setattr(
        autofit, "summed_loss", lambda module, batch, way: shapes.append(batch.shape) or original(module, batch, way)
    )
    ticks = SimpleNamespace(perf_counter=iter([0.0, 5.0, 5.5, 6.0, 7.0, 7.5]).__next__)
    monkeypatch.setattr(autofit, "time", ticks)
    assert autofit.trial_s(model, Placement(None, 2), 16) == 0.5
    assert len(passes) == 2  # the first warms up
    assert all(parameter.grad is None for parameter in model.module.parameters())
    monkeypatch.setattr(autofit, "CPU_TRIAL_TOKENS", 8)
    assert autofit.trial_s(model, Placement(None, 2), 16) == 4 * 0.5  # a quarter of the tokens
    assert [tuple(each) for each in shapes] == [(2, 17)] * 2 + [(1, 9)] * 2


@pytest.mark.parametrize(
    ("is_large", "has_bf16", "half_s", "found"),
    [(True, True, 1.0, BF16), (True, True, 9.0, FP32), (True, False, 1.0, FP32), (False, True, 1.0, FP32)],
)
def test_a_cpu_with_fast_bf16_tries_it(tiny_run, monkeypatch, is_large, has_bf16, half_s, found):
    tiny = tiny_run()
    model = tiny.model()
    monkeypatch.setattr(autofit, "BF16_PARAMETERS", model.theta.numel() + (0 if is_large else 1))
    monkeypatch.setattr(accelerator, "has_fast_bf16", lambda: has_bf16)
    seconds_each = {torch.bfloat16: half_s, None: 2.0}
    monkeypatch.setattr(autofit, "trial_s", lambda _, how, length, packed: seconds_each[how.autocast])
    assert place(model, tiny.manifest.model, tiny.manifest.training).autocast is found.autocast


def on(device, tiny):
    """Return the tiny model, whose passes run on the CPU, as if it were on this device."""
    model = tiny.model()
    theta = SimpleNamespace(device=device, nbytes=model.theta.nbytes, numel=model.theta.numel)
    return SimpleNamespace(theta=theta, module=model.module)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize(
    ("has_bf16", "half_s", "found"),
    [(True, 1.0, torch.bfloat16), (True, 9.0, None), (False, 1.0, torch.float16), (False, 9.0, None)],
)
def test_a_card_is_asked_for_both_ways(tiny_run, monkeypatch, kind, has_bf16, half_s, found):
    """Check both placements with real passes and the double of a card on which two sequences do not fit."""
    tiny = tiny_run()
    model = on(torch.device(kind, 0), tiny)
    machine_with(monkeypatch, **{kind: 1})
    monkeypatch.setattr(accelerator, "autocasts", lambda device, dtype: True)
    answers = {"mem_get_info": (20 * GB, 40 * GB), "memory_reserved": 100, "memory_allocated": 100}
    answers |= {"is_bf16_supported": has_bf16, "reset_peak_memory_stats": None, "max_memory_allocated": 9 * GB}
    with_memory(monkeypatch, kind, empty_cache=None, synchronize=None, **answers)
    seconds_each = {torch.bfloat16: half_s, torch.float16: half_s, None: 2.0}
    monkeypatch.setattr(autofit, "trial_s", lambda _, how, length, packed: how.micro_batch * seconds_each[how.autocast])
    assert place(model, tiny.manifest.model, tiny.manifest.training) == Placement(found, 1)
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_where_nothing_is_counted_the_estimate_counts(tiny_run, monkeypatch):
    """Check Apple's chip, which shares the host's memory, and a card that does not say what is free."""
    tiny = tiny_run()
    described, training = tiny.manifest.model, tiny.manifest.training
    one = pass_bytes(described, training.sequence_length)
    machine_with(monkeypatch, mps=1, xpu=1)
    monkeypatch.setattr(accelerator, "autocasts", lambda device, dtype: False)
    for kind in ("mps", "xpu"):
        with_memory(monkeypatch, kind, empty_cache=None, synchronize=None)
    with_memory(monkeypatch, "mps", recommended_max_memory=11 * GB, driver_allocated_memory=GB)
    silent = RuntimeError("doesn't support querying the available free memory")
    with_memory(monkeypatch, "xpu", mem_get_info=silent, reset_peak_memory_stats=silent, is_bf16_supported=False)
    for device in (torch.device("mps"), torch.device("xpu", 0)):
        for allowed, sequences in ((one, 1), (2 * one, 2), (4 * one, 4)):
            found = place(on(device, tiny), described, training, allowed)
            assert found == Placement(None, sequences)
        assert place(on(device, tiny), described, training, 1) == Placement(None, 1, recomputes=True)


def test_the_budget_of_a_card_leaves_room_for_what_is_as_large_as_the_weights(monkeypatch):
    machine_with(monkeypatch, cuda=1, mps=1)
    with_memory(monkeypatch, "cuda", mem_get_info=(10 * GB, 16 * GB), memory_reserved=0, memory_allocated=0)
    model = SimpleNamespace(theta=SimpleNamespace(device=torch.device("cuda", 0), nbytes=GB))
    assert autofit._budget_bytes(model, GB) == 5 * GB  # four fifths of what is free, less three times the weights
    with_memory(monkeypatch, "mps", recommended_max_memory=10 * GB, driver_allocated_memory=0)
    model.theta.device, model.theta.nbytes = torch.device("mps"), GB
    assert [autofit._budget_bytes(model, most) for most in (GB, 9 * GB)] == [GB, 5 * GB]


def test_a_chip_without_room_is_explained(tiny_run, monkeypatch):
    tiny = tiny_run()
    machine_with(monkeypatch, mps=1)
    monkeypatch.setattr(accelerator, "autocasts", lambda device, dtype: True)
    with_memory(monkeypatch, "mps", recommended_max_memory=GB, driver_allocated_memory=GB, empty_cache=None)
    with_memory(monkeypatch, "mps", synchronize=None)
    with pytest.raises(DeviceError, match="does not fit this device"):
        place(on(torch.device("mps"), tiny), tiny.manifest.model, tiny.manifest.training)
