"""Capacity of a machine for a run: what is counted, and the memory that a container has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest, parameter_count, preset
from p2ptrain.recipes import RECIPES
from p2ptrain.train.autofit import CPU_ACTIVATION_BYTES, cpu_micro_batch, cpu_sequence_bytes
from peer.capacity import (
    BASE_BYTES,
    CPU_BYTES,
    activation_bytes,
    check_memory,
    compiler_fault,
    explained,
    host_bytes,
    installed_memory,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def each(manifest: Manifest) -> float:
    """Return the bytes per parameter that training on the CPU takes without activations."""
    return host_bytes(RECIPES[manifest.outer.recipe], manifest.outer.fragments) + CPU_BYTES


def test_six_gigabytes_do_not_train_the_large_model_on_the_cpu() -> None:
    """Check the memory: weights and moments fit, but not together with one sequence's activations."""
    large = preset("llama-135m", "ab" * 32)
    one = cpu_sequence_bytes(large.model, large.training)
    assert one > CPU_ACTIVATION_BYTES
    with pytest.raises(DeviceError, match="smaller model"):
        check_memory(large, CPU, installed_bytes=6_000_000_000)
    check_memory(large, CPU, installed_bytes=math.ceil(each(large) * parameter_count(large.model)) + one)
    check_memory(large, CUDA, installed_bytes=6_000_000_000)
    with pytest.raises(DeviceError, match="smaller model"):  # its memory is the host's
        check_memory(large, torch.device("mps"), installed_bytes=6_000_000_000)


def test_activations_are_counted_as_the_micro_batch_takes_them() -> None:
    demo = preset("demo", "ab" * 32)
    weights = math.ceil(each(demo) * parameter_count(demo.model))
    together = cpu_sequence_bytes(demo.model, demo.training) * demo.training.sequences_per_step
    check_memory(demo, CPU, installed_bytes=weights + together)
    with pytest.raises(DeviceError, match="smaller model"):
        check_memory(demo, CPU, installed_bytes=weights + together - 1)


def test_less_memory_means_smaller_micro_batches_and_too_little_a_sentence() -> None:
    demo = preset("demo", "ab" * 32)
    one = cpu_sequence_bytes(demo.model, demo.training)
    fixed = BASE_BYTES + math.ceil(each(demo) * parameter_count(demo.model))
    assert activation_bytes(demo, CPU, math.inf) == CPU_ACTIVATION_BYTES
    for sequences in (1, 2):
        spare = activation_bytes(demo, CPU, fixed + sequences * one)
        assert cpu_micro_batch(demo.model, demo.training, spare) == sequences
    with pytest.raises(DeviceError) as caught:
        activation_bytes(demo, CPU, 250_000_000)
    assert str(caught.value) == (
        "The run's model needs at least 0.5 GB of memory with Python and torch, but memory_gb in settings.toml allows "
        "0.25 GB.\n  Raise memory_gb, or join a run with a smaller model."
    )
    activation_bytes(
        demo, CUDA, BASE_BYTES + math.ceil((each(demo) - CPU_BYTES) * parameter_count(demo.model))
    )  # activations are on the card


def test_the_compiler_must_fit_beside_the_peer() -> None:
    demo, large = preset("demo", "ab" * 32), preset("llama-135m", "ab" * 32)
    assert compiler_fault(demo, 2, math.inf) == ""
    assert "of memory, and 0.0 GB are free" in compiler_fault(demo, 2, 250_000_000)
    assert compiler_fault(large, 10**6, math.inf).startswith("the compiler needs ")


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
