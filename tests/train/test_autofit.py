"""The number of sequences that fit a device, and the type that is faster on it."""

from types import SimpleNamespace

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import preset
from p2ptrain.train import accelerator, autofit
from p2ptrain.train.autofit import (
    Placement,
    fastest,
    place,
    placement_within,
)
from p2ptrain.train.memory import pass_bytes
from tests.train.devices import GB, machine_with, with_memory


def test_errors_of_the_program_are_no_lack_of_memory():
    def broken(how):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        fastest([BF16, FP32], broken)


def test_on_the_cpu_the_demo_is_computed_at_once_and_a_large_model_by_the_sequence(tiny_run):
    demo, middle, large = (preset(name, "ab" * 32) for name in ("demo", "llama-15m", "llama-135m"))
    assert placement_within(demo.model, demo.training) == Placement(None, demo.training.sequences_per_step)
    assert placement_within(middle.model, middle.training) == Placement(None, 8)  # 14 of 16 fit: two equal parts
    one = pass_bytes(large.model, large.training.sequence_length)
    assert placement_within(large.model, large.training, one) == Placement(None, 1)
    assert placement_within(large.model, large.training, one - 1).recomputes
    assert placement_within(large.model, large.training, 1) == Placement(None, 1, recomputes=True)
    tiny = tiny_run()
    assert place(tiny.model(), tiny.manifest.model, tiny.manifest.training) == Placement(None, 4)
    assert place(tiny.model(), tiny.manifest.model, tiny.manifest.training, 1).recomputes


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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("simulated"), RuntimeError("MPS backend out of memory")])
def test_a_device_without_room_for_one_sequence_is_explained(error):
    def trial(how):
        raise error

    with pytest.raises(DeviceError, match="does not fit this device"):
        fastest([Placement(None, 2)], trial)


def test_a_single_way_is_tried_once():
    tried = []
    assert fastest([FP32], lambda how: tried.append(how) or 0.01) == FP32
    assert tried == [FP32]


def test_a_way_that_the_backend_lacks_is_left_out():
    def trial(how):
        if how.autocast in lacking:
            raise NotImplementedError("The operator 'aten::_some' is not implemented for MPS\nIf you want")
        return 1.0

    lacking = {torch.bfloat16}
    assert fastest([BF16, FP32], trial) == FP32
    lacking.add(None)
    with pytest.raises(
        DeviceError, match=r"lacks an operation of the model \(The operator 'aten::_some' .* MPS\)"
    ) as caught:
        fastest([BF16, FP32], trial)
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
    """Check the choice of the double of a card that has room for all four sequences."""
    tiny = tiny_run()
    model = on(torch.device(kind, 0), tiny)
    machine_with(monkeypatch, **{kind: 1})
    monkeypatch.setattr(accelerator, "autocasts", lambda device, dtype: True)
    answers = {"mem_get_info": (20 * GB, 40 * GB), "memory_reserved": 100, "memory_allocated": 100}
    answers |= {"is_bf16_supported": has_bf16}
    with_memory(monkeypatch, kind, empty_cache=None, synchronize=None, **answers)
    seconds_each = {torch.bfloat16: half_s, torch.float16: half_s, None: 2.0}
    monkeypatch.setattr(autofit, "trial_s", lambda _, how, length, packed: how.micro_batch * seconds_each[how.autocast])
    assert place(model, tiny.manifest.model, tiny.manifest.training) == Placement(found, 4)
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_chips_get_what_the_host_gives(tiny_run, monkeypatch):
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
    with_memory(monkeypatch, "xpu", mem_get_info=silent, is_bf16_supported=False)
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
