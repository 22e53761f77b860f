"""What the doctor says about the device that would train, on doubles of cards, and about its speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from p2ptrain.manifest import SignedManifest
from p2ptrain.train import accelerator, autofit
from p2ptrain.train.autofit import Placement
from peer.doctor import machine, speed
from peer.doctor.findings import FindingState
from tests.train.devices import GB, machine_with, with_memory


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's cards."""
    monkeypatch.setattr(machine, "_driver", lambda: None)
    monkeypatch.setattr(machine, "_amd_bytes", lambda: 0)
    machine_with(monkeypatch)


def test_a_processor_is_told_with_what_it_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, products in ((True, "in bfloat16 and fp32, "), (False, "in fp32, ")):
        monkeypatch.setattr(accelerator, "has_fast_bf16", lambda has_bf16=has_bf16: has_bf16)
        (found,) = machine.device("auto")
        assert found.state is FindingState.OK
        assert found.found.startswith("CPU, ")
        assert f"matrix products {products}{torch.backends.cpu.get_cpu_capability()}" in found.found


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cuda", "Some card of cuda, 16.0 GB, driver 580; matrix products in float16 and TF32"),
        ("xpu", "Some card of xpu, 16.0 GB; matrix products in float16 and fp32"),
        ("mps", "Apple M4, 11.0 GB; matrix products in float16 and fp32"),
    ],
)
def test_a_card_is_told_with_what_it_computes_with(monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
    machine_with(monkeypatch, **{kind: 1})
    monkeypatch.setattr(accelerator, "_compute", lambda device: None)
    monkeypatch.setattr(accelerator, "allow_tf32", lambda device: None)
    monkeypatch.setattr(accelerator, "autocasts", lambda device, dtype: False)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4")
    monkeypatch.setattr(machine, "_driver", lambda: ("Some card", "580"))
    with_memory(monkeypatch, "cuda", is_bf16_supported=False, is_tf32_supported=True)
    with_memory(monkeypatch, "xpu", is_bf16_supported=False)
    with_memory(monkeypatch, "mps", recommended_max_memory=11 * GB)
    (found,) = machine.device("auto")
    assert found.state is FindingState.OK
    assert found.found.startswith(words)


def test_an_idle_card_of_amd_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    assert machine._amd_bytes(tmp_path) == 0
    for number, text in enumerate(("512000000", "17163091968", "?")):
        device = tmp_path / f"card{number}" / "device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{text}\n")
    there = machine._amd_bytes(tmp_path)
    assert there == 17_163_091_968
    machine_with(monkeypatch)
    monkeypatch.setattr(machine, "_driver", lambda: None)
    monkeypatch.setattr(machine, "_amd_bytes", lambda: there)
    (found,) = machine.device("auto")
    assert found.state is FindingState.NOTE
    assert "does not use the card of AMD with 17.2 GB" in found.found
    assert "ROCm" in found.fix
    assert machine.device("cpu")[0].state is FindingState.OK  # the owner wants it so


def test_the_speed_of_the_run_is_measured(
    signed_run: Callable[..., SignedManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "trial_s", lambda model, how, length: 0.5)
    monkeypatch.setattr(speed.cgroups, "usable_cpus", lambda: 64)
    manifest, threads = signed_run().manifest, torch.get_num_threads()
    found = speed.check_speed(manifest, "cpu", math.inf, threads=2)
    training = manifest.training
    at_once = training.sequences_per_step
    tokens_per_s = 2 * at_once * training.sequence_length
    assert training.optimizer == "muon"
    how = f"in fp32, Muon in fp32, {at_once} of {at_once} sequences at once"
    assert found.found == f"about {tokens_per_s:,} tokens/s without compiled code, {how}"
    assert (found.state, torch.get_num_threads()) == (FindingState.NOTE, threads)
    assert "2 of 64 CPUs would train" in found.fix


def test_what_would_be_faster_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card, how = torch.device("cuda", 0), Placement(None, 4)
    with_memory(monkeypatch, "cuda", is_tf32_supported=True, get_device_capability=(8, 6))
    efficient = "with memory-efficient attention"
    assert speed.computes_in(how, card) == f"fp32, with matrix products in TF32, {efficient}"
    assert speed.computes_in(Placement(torch.bfloat16, 4), card) == "bfloat16, with flash attention"
    with_memory(monkeypatch, "cuda", is_tf32_supported=False, get_device_capability=(7, 5))
    assert speed.computes_in(Placement(torch.float16, 4), card) == f"float16, {efficient}"
    assert speed.faster(card, how, 4, 1, 0) == []
    assert "Close other programs" in speed.faster(card, how, 16, 1, 0)[0]
    cpu = torch.device("cpu")
    assert "Raise memory_gb" in speed.faster(cpu, how, 16, 1024, 5)[0]
    assert speed.faster(cpu, how, 16, 1024, autofit.CPU_ACTIVATION_BYTES) == []
