"""Capacity of a machine for a run: what is counted, and the memory that a container has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest, parameter_count, preset, with_changes
from p2ptrain.recipes import RECIPES
from p2ptrain.train.accelerator import explained
from p2ptrain.train.autofit import placement_within
from p2ptrain.train.memory import (
    BASE_BYTES,
    CPU_ACTIVATION_BYTES,
    HEAP,
    RECOMPUTED_HEAP,
    STATE_BYTES,
    activation_bytes,
    check_ranks,
    compiler_fault,
    host_bytes,
    installed_memory,
    pass_bytes,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def fixed(manifest: Manifest) -> int:
    """Return the bytes that training on the CPU takes without activations."""
    each = host_bytes(RECIPES[manifest.outer.recipe], manifest.outer.fragments) + STATE_BYTES
    return math.ceil(each * parameter_count(manifest.model))


def least(run: Manifest) -> int:
    return math.ceil(RECOMPUTED_HEAP * pass_bytes(run.model, run.training.sequence_length, recomputes=True))


def test_six_gigabytes_train_the_large_model_on_the_cpu_and_five_do_not() -> None:
    """Check the memory: one sequence takes 1.2 GB beside weights and moments if activations are recomputed."""
    large = preset("llama-135m", "ab" * 32)
    activation_bytes(large, CPU, installed_bytes=6_000_000_000)
    with pytest.raises(DeviceError, match="smaller model"):
        activation_bytes(large, CPU, installed_bytes=5_000_000_000)
    activation_bytes(large, CPU, installed_bytes=fixed(large) + least(large))
    activation_bytes(large, CUDA, installed_bytes=5_000_000_000)
    with pytest.raises(DeviceError, match="smaller model"):  # its memory is the host's
        activation_bytes(large, torch.device("mps"), installed_bytes=5_000_000_000)


GB = 1_000_000_000


def seven_billion() -> Manifest:
    """Return a run of a model of the size of Llama 2 7B."""
    config = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    changes: dict[str, Any] = {f"model.config.{name}": value for name, value in config.items()}
    changes |= {"training.sequence_length": 512, "outer.cut": "layers"}
    return with_changes(preset("llama-135m", "ab" * 32), changes)


@pytest.mark.parametrize(
    ("devices", "gigabytes"),
    [([CUDA, CUDA], 113), ([CPU, CPU], 232), ([CUDA, CPU], 172), ([CUDA] * 4, 114), ([CPU] * 4, 353)],
)
def test_seven_billion_parameters_fit_hosts_that_have_the_memory(devices: list[torch.device], gigabytes: int) -> None:
    """Check that replicas hold the inner state again, and all ranks together the outer one once."""
    run = seven_billion()
    assert parameter_count(run.model) == pytest.approx(6.7e9, rel=0.03)
    check_ranks(run, devices, 2, (gigabytes + 1) * GB)
    with pytest.raises(DeviceError, match=f"6,607,343,616 parameters .* this machine has {gigabytes}.0 GB"):
        check_ranks(run, devices, 2, gigabytes * GB)


def test_one_rank_needs_what_one_process_does() -> None:
    large = preset("llama-135m", "ab" * 32)
    check_ranks(large, [CPU], 1, 10 * GB)
    with pytest.raises(DeviceError, match="needs at least"):
        check_ranks(large, [CPU], 1, 4 * GB)


def test_activations_count_as_one_sequence_takes_them() -> None:
    demo = preset("demo", "ab" * 32)
    needed = fixed(demo) + least(demo)
    activation_bytes(demo, CPU, installed_bytes=needed)
    with pytest.raises(DeviceError, match="smaller model"):
        activation_bytes(demo, CPU, installed_bytes=needed - 2)


def test_a_large_model_recomputes_only_if_memory_is_short() -> None:
    large = preset("llama-135m", "ab" * 32)
    kept = math.ceil(HEAP * pass_bytes(large.model, large.training.sequence_length))
    whole = BASE_BYTES + fixed(large)
    for there, recomputes in (
        (24 * GIB, False),
        (whole + kept, False),
        (whole + kept - 9, True),
        (fixed(large) + least(large), True),
    ):
        for spare in (
            activation_bytes(large, CPU, math.inf, installed_bytes=there),
            activation_bytes(large, CPU, max(there, whole + least(large)), installed_bytes=24 * GIB),
        ):
            assert placement_within(large.model, large.training, spare).recomputes == recomputes


def test_less_memory_means_smaller_micro_batches_and_too_little_a_sentence() -> None:
    demo = preset("demo", "ab" * 32)
    assert activation_bytes(demo, CPU, math.inf) == CPU_ACTIVATION_BYTES
    for sequences in (1, 2):
        taken = HEAP * pass_bytes(demo.model, demo.training.sequence_length, sequences)
        spare = activation_bytes(demo, CPU, math.ceil(BASE_BYTES + fixed(demo) + taken))
        assert placement_within(demo.model, demo.training, spare).micro_batch == sequences
    with pytest.raises(DeviceError) as caught:
        activation_bytes(demo, CPU, 250_000_000)
    assert str(caught.value) == (
        "The run's model needs at least 0.5 GB of memory with Python and torch, but memory_gb in settings.toml allows "
        "0.25 GB.\n  Raise memory_gb, or join a run with a smaller model."
    )
    on_card = fixed(demo) - STATE_BYTES * parameter_count(demo.model)
    activation_bytes(demo, CUDA, BASE_BYTES + on_card)  # activations are on the card


def test_the_compiler_must_fit_beside_the_peer() -> None:
    demo, large = preset("demo", "ab" * 32), preset("llama-135m", "ab" * 32)
    assert compiler_fault(demo, CPU, 2, math.inf) == ""
    assert "of memory, and 0.0 GB are free" in compiler_fault(demo, CPU, 2, 250_000_000)
    assert compiler_fault(large, CPU, 10**6, math.inf).startswith("the compiler needs ")


def test_on_a_card_the_compiler_needs_no_host_memory_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.train.memory.shares_host_memory", lambda device: device == CPU)
    large = preset("llama-135m", "ab" * 32)
    assert "needs 0.8 GB" in compiler_fault(large, CUDA, 16, 250_000_000)
    assert "needs 0.8 GB" not in compiler_fault(large, CPU, 16, 250_000_000)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    there = installed_memory(tmp_path)
    assert there > GIB
    for place, text in (("proc/self/cgroup", "0::/"), ("sys/fs/cgroup/memory.max", str(GIB))):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(text)
    assert installed_memory(tmp_path) == GIB


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
        ),
    ],
)
def test_every_way_to_run_out_of_memory_is_explained(error: Exception) -> None:
    with pytest.raises(DeviceError, match="does not fit the free memory of cpu"), explained(CPU):
        raise error


def test_torch_says_it_as_we_expect() -> None:
    with pytest.raises(DeviceError, match="does not fit"), explained(CPU):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shapes differ")])
def test_our_own_faults_keep_their_tracebacks(error: Exception) -> None:
    with pytest.raises(type(error)), explained(CPU):
        raise error
