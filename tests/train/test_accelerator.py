"""Devices that are there, missing or broken, and what each backend says about itself. Cards are doubles."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.train import accelerator
from p2ptrain.train.accelerator import (
    autocasts,
    cards,
    choose_device,
    free_bytes,
    half_type,
    is_out_of_memory,
)
from tests.train.devices import GB, machine_with, with_memory

CPU, MPS = torch.device("cpu"), torch.device("mps")
CUDA, XPU = torch.device("cuda", 0), torch.device("xpu", 0)


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace what TF32 is turned on in; every card computes until a test says otherwise."""
    matmul, mkldnn = SimpleNamespace(allow_tf32=False), SimpleNamespace(allow_tf32=False)
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=matmul))
    monkeypatch.setattr(torch.backends, "mkldnn", mkldnn)
    monkeypatch.setattr(accelerator, "_compute", lambda device: None)
    return SimpleNamespace(cuda=matmul, xpu=mkldnn)


def failing(*broken: torch.device) -> Callable[[torch.device], None]:
    """Fail like ``_compute`` on cards on which nothing runs."""

    def compute(device: torch.device) -> None:
        if device in broken:
            raise RuntimeError("all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be")

    return compute


def test_without_a_card_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch)
    assert choose_device("auto") == choose_device("cpu") == CPU


@pytest.mark.parametrize(
    ("name", "there", "found"),
    [
        ("auto", {"cuda": 2}, "cuda:0"),
        ("cuda", {"cuda": 2}, "cuda:0"),
        ("cuda:1", {"cuda": 2}, "cuda:1"),
        ("auto", {"xpu": 1}, "xpu:0"),
        ("xpu:1", {"cuda": 1, "xpu": 2}, "xpu:1"),
        ("auto", {"cuda": 1, "xpu": 1}, "cuda:0"),
        ("auto", {"mps": 1}, "mps"),
        ("mps", {"mps": 1}, "mps"),
        ("cpu", {"cuda": 1, "mps": 1}, "cpu"),
    ],
)
def test_with_cards(monkeypatch: pytest.MonkeyPatch, name: str, there: dict[str, int], found: str) -> None:
    """Check the current device, too: autocast uses it, wherever the tensors are."""
    made_current = machine_with(monkeypatch, **there)
    assert str(choose_device(name)) == found
    assert list(map(str, made_current[-1:])) == ([found] if ":" in found else [])


def test_auto_takes_the_first_card_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a card that another program has taken exclusively, and cards of which none computes."""
    machine_with(monkeypatch, cuda=2, xpu=1, mps=1)
    there, said = [CUDA, torch.device("cuda", 1), XPU, MPS], []
    monkeypatch.setattr(accelerator.logger, "warning", lambda text, *words: said.append(text % words))
    for broken in range(len(there) + 1):
        monkeypatch.setattr(accelerator, "_compute", failing(*there[:broken]))
        assert choose_device("auto") == [*there, CPU][broken]
    assert said[0] == "cuda:0 is not used: all CUDA-capable devices are busy or unavailable"  # one line


def test_a_card_on_which_nothing_runs_is_explained_to_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, cuda=2)
    monkeypatch.setattr(accelerator, "_compute", failing(torch.device("cuda", 1)))
    with pytest.raises(DeviceError, match=r"cuda:1 was requested, but nothing runs on it \(all CUDA") as caught:
        choose_device("cuda:1")
    assert "kernel errors" not in caught.value.problem  # one line
    assert caught.value.remedy.endswith("or use --device cpu or cuda:0.")


@pytest.mark.parametrize("error", [RuntimeError(""), AssertionError("Torch not compiled with XPU enabled")])
def test_a_card_that_cannot_even_be_made_current_is_not_used(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    machine_with(monkeypatch, xpu=1)
    with_memory(monkeypatch, "xpu", set_device=error)
    assert choose_device("auto") == CPU
    with pytest.raises(DeviceError, match="nothing runs on it"):
        choose_device("xpu")


def test_absent_cards_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, xpu=1)
    builds = (("cuda", "12.8", "nvidia-smi"), ("hip", "6.4", "rocminfo"), ("cuda", None, "without CUDA"))
    for name, version, words in builds:
        for each in ("cuda", "hip"):
            monkeypatch.setattr(torch.version, each, version if each == name else None)
        with pytest.raises(DeviceError, match=words) as caught:
            choose_device("cuda:0")
        assert "--device cpu or xpu:0" in caught.value.remedy
    machine_with(monkeypatch)
    for built, words in (("2025", "clinfo"), (None, "without XPU")):
        monkeypatch.setattr(torch.version, "xpu", built)
        with pytest.raises(DeviceError, match=words):
            choose_device("xpu")
    for is_built, words in ((True, "macOS 14"), (False, "without MPS")):
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda is_built=is_built: is_built)
        with pytest.raises(DeviceError, match=words):
            choose_device("mps")


def test_a_card_too_many_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, cuda=2)
    with pytest.raises(DeviceError, match=r"cuda:2 was requested, but this machine has 2") as caught:
        choose_device("cuda:2")
    assert "cuda:0 or cuda:1" in caught.value.remedy


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", "mps:1", "meta", "xpu:1000"])
def test_a_device_of_no_known_kind_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine_with(monkeypatch, mps=1)
    with pytest.raises(DeviceError, match="There is no device") as caught:
        choose_device(name)
    assert caught.value.remedy == "Use --device cpu or mps."


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_tf32_is_for_cards_that_have_it_and_not_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, backends: SimpleNamespace, kind: str
) -> None:
    machine_with(monkeypatch, **{kind: 1, "mps": 1})
    for name in ("cpu", "mps", kind):
        choose_device(name)
    assert (backends.cuda.allow_tf32, backends.xpu.allow_tf32) == (False, False)
    with_memory(monkeypatch, kind, is_tf32_supported=True)
    choose_device(kind, is_exact=True)
    assert not vars(backends)[kind].allow_tf32
    choose_device(kind)
    assert (backends.cuda.allow_tf32, backends.xpu.allow_tf32) == (kind == "cuda", kind == "xpu")
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_a_card_is_asked_to_compute_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    accelerator._compute(CPU)
    monkeypatch.setattr(torch, "ones", lambda *shape, **how: torch.full(shape, 1.5, **how))  # wrong memory
    with pytest.raises(RuntimeError, match="wrongly"):
        accelerator._compute(CPU)


# --- what a device can do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_card_that_only_emulates_bf16_computes_in_fp16(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    machine_with(monkeypatch, **{kind: 1})
    asked: list[object] = []
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(
            getattr(torch, kind), "is_bf16_supported", lambda has=has_bf16, **options: asked.append(options) or has
        )
        assert half_type(torch.device(kind, 0)) is dtype
    assert asked == [{"including_emulation": False}] * 2


def test_apples_chip_computes_in_bf16_where_autocast_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for can, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(accelerator, "autocasts", lambda device, dtype, can=can: can)
        assert half_type(MPS) is dtype


def test_autocast_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autocasts(CPU, torch.bfloat16)
    with pytest.warns(UserWarning, match="not supported"):  # torch computes in fp32, as on an old macOS
        assert not autocasts(CPU, torch.float64)
    for error in (RuntimeError("no autocast here"), NotImplementedError("no such kernel")):
        with_memory(monkeypatch, "mps")
        monkeypatch.setattr(torch, "autocast", lambda kind, dtype, error=error: throwing(error))
        assert not autocasts(CPU, torch.bfloat16)
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: throwing(RuntimeError("MPS backend out of memory")))
    with pytest.raises(RuntimeError):
        autocasts(CPU, torch.bfloat16)


def throwing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("abilities", "is_fast"),
    [
        ({}, False),
        ({"avx512_bf16": False, "avx2": True}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": 1}, True),
    ],
)
def test_fast_bf16_of_a_processor(monkeypatch: pytest.MonkeyPatch, abilities: dict[str, object], is_fast: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    assert accelerator.has_fast_bf16() is is_fast


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"), True),
        (RuntimeError("Invalid buffer size: 12.50 GiB"), True),
        (RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate"), True),
        (RuntimeError("shapes differ"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_free_memory_of_each_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cuda", "xpu"):
        with_memory(monkeypatch, kind, mem_get_info=(9 * GB, 16 * GB), memory_reserved=3 * GB, memory_allocated=GB)
        assert free_bytes(torch.device(kind, 0)) == 11 * GB  # what torch has reserved and does not use is free
    with_memory(monkeypatch, "mps", recommended_max_memory=11 * GB, driver_allocated_memory=12 * GB)
    assert free_bytes(MPS) == 0
    assert accelerator.total_bytes(MPS) == 11 * GB


@pytest.mark.parametrize(
    "error", [RuntimeError("doesn't support querying the available free memory"), AttributeError()]
)
def test_a_card_that_answers_nothing_about_its_memory(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with_memory(monkeypatch, "xpu", mem_get_info=error, max_memory_allocated=error)
    assert free_bytes(XPU) is accelerator.peak_bytes(XPU) is None


def test_each_backend_is_asked_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, cuda=1, xpu=1, mps=1)
    asked: list[object] = []
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "synchronize", asked.append)
        with_memory(monkeypatch, kind, max_memory_allocated=7)
        monkeypatch.setattr(getattr(torch, kind), "empty_cache", lambda kind=kind: asked.append(f"{kind} emptied"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: asked.append("mps"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: asked.append("mps emptied"))
    for device in (CPU, CUDA, XPU, MPS):
        accelerator.synchronize(device)
        accelerator.empty_cache(device)
        with accelerator.current(device):
            assert accelerator.peak_bytes(device) == (7 if device in (CUDA, XPU) else None)
    assert asked == [CUDA, "cuda emptied", XPU, "xpu emptied", "mps", "mps emptied"]


def test_names_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, cuda=1, mps=1)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4")
    assert [accelerator.product_name(each) for each in (CUDA, MPS)] == ["Some card of cuda", "Apple M4"]
    assert accelerator.total_bytes(CUDA) == 16 * GB
    assert cards("xpu") == []


def test_integrated_chips_share_the_hosts_memory_and_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, xpu=2, cuda=1)
    assert [accelerator.shares_host_memory(each) for each in (CPU, MPS, CUDA)] == [True, True, False]
    with_memory(monkeypatch, "cuda", get_device_properties=SimpleNamespace(is_integrated=1))
    assert accelerator.shares_host_memory(CUDA)
    for error in (RuntimeError("no driver"), AssertionError("Torch not compiled with CUDA enabled")):
        with_memory(monkeypatch, "cuda", get_device_properties=error, is_available=False)
        assert not accelerator.shares_host_memory(CUDA)
    monkeypatch.setattr(
        torch.xpu, "get_device_properties", lambda card: SimpleNamespace(is_integrated_gpu=card.index == 0)
    )
    assert choose_device("auto") == torch.device("xpu", 1)
