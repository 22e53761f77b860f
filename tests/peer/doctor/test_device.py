"""What the doctor says about the device that would train, on doubles of cards, and about its speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from p2ptrain.manifest import SignedManifest
from p2ptrain.train import accelerator, memory
from p2ptrain.train.autofit import Placement
from peer.doctor import machine, speed
from peer.doctor.findings import FindingState
from tests.train.devices import machine_with, with_memory


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's cards."""
    monkeypatch.setattr(machine, "_driver", lambda: None)
    monkeypatch.setattr(machine, "_amd_bytes", lambda: 0)
    machine_with(monkeypatch)


def test_the_devices_that_would_train(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.device("auto").state is FindingState.OK
    assert machine.device("auto").found.startswith("CPU, ")
    machine_with(monkeypatch, cuda=2)
    monkeypatch.setattr(accelerator, "_compute", lambda device: None)
    monkeypatch.setattr(accelerator, "allow_tf32", lambda device: None)
    with_memory(monkeypatch, "cuda")
    monkeypatch.setattr(machine, "_driver", lambda: ("Some card", "580"))
    assert machine.device("cuda:0").found == "Some card of cuda, 16.0 GB; driver 580"
    card = "Some card of cuda, 16.0 GB"
    assert machine.device("all").found == f"{card}; {card}; driver 580"


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
    found = machine.device("auto")
    assert found.state is FindingState.NOTE
    assert "does not use the card of AMD with 17.2 GB" in found.found
    assert "ROCm" in found.fix
    assert machine.device("cpu").state is FindingState.OK  # the owner wants it so


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
    how = f"in fp32, {at_once} of {at_once} sequences at once"
    assert found.found == f"about {tokens_per_s:,} tokens/s without compiled code, {how}"
    assert (found.state, torch.get_num_threads()) == (FindingState.NOTE, threads)
    assert "2 of 64 CPUs would train" in found.fix


def test_what_would_be_faster_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card, how = torch.device("cuda", 0), Placement(None, 4)
    assert speed.faster(card, how, 4, 1, 0) == []
    assert "Close other programs" in speed.faster(card, how, 16, 1, 0)[0]
    cpu = torch.device("cpu")
    assert "Raise memory_gb" in speed.faster(cpu, how, 16, 1024, 5)[0]
    assert speed.faster(cpu, how, 16, 1024, memory.CPU_ACTIVATION_BYTES) == []
