"""The plain loop that training is compared with computes the same, and the comparison reports both sides."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from bench import throughput
from bench.couple import manifest_of
from bench.plain import PlainLlama, stepper
from p2ptrain.manifest import Manifest
from p2ptrain.train.model import build_module, summed_loss


def run_of(**config: int) -> Manifest:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **config}
    return manifest_of("demo", {f"model.config.{name}": value for name, value in small.items()})


def plain_of(run: Manifest) -> PlainLlama:
    return PlainLlama(throughput.shape_of(run), run.training.sequence_length)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_plain_model_computes_the_loss_of_ours(kv_heads: int) -> None:
    run = run_of(num_key_value_heads=kv_heads)
    ours = build_module(run.model, seed=3)
    plain = plain_of(run)
    plain.load_state_dict(ours.state_dict())
    batch = torch.randint(run.model.config.vocab_size, (2, run.training.sequence_length + 1))
    expected = summed_loss(ours, batch, None) / (2 * run.training.sequence_length)
    assert plain(batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_plain_step_learns_and_does_not_depend_on_the_micro_batch(optimizer: Literal["adamw", "muon"]) -> None:
    run = run_of(num_key_value_heads=4)
    batch = torch.randint(run.model.config.vocab_size, (4, run.training.sequence_length + 1))
    losses = []
    for micro_batch in (4, 1):
        torch.manual_seed(5)
        model = plain_of(run)
        step = stepper(model, micro_batch, 3e-3, None, compiled=False, optimizer=optimizer)
        before = model(batch).item()
        for _ in range(5):
            step(batch)
        losses.append(model(batch).item())
        assert losses[-1] < before
    assert losses[0] == pytest.approx(
        losses[1], rel=1e-4 if optimizer == "adamw" else 1e-2
    )  # torch's Muon rounds to bf16


def test_a_large_model_is_shortened_on_a_cpu_alone() -> None:
    on_cpu = throughput.described("llama-135m", torch.device("cpu"), "muon")
    on_card = throughput.described("llama-135m", torch.device("cuda"), "muon")
    assert on_cpu.training.optimizer == manifest_of("llama-135m", {}).training.optimizer == "muon"
    assert on_cpu.training.tokens_per_step == 512
    assert on_card.training.tokens_per_step == 32 * 2048


def test_operations_are_those_of_all_products() -> None:
    """Check a case counted by hand: 2 layers of 32, 128 tokens, P = 1000."""
    run = run_of(num_key_value_heads=4)
    assert throughput.flops_per_token(1000, run) == 6000 + 12 * 2 * 32 * 128


def test_both_sides_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Fake:
        def __init__(self, name: str, *_: object) -> None:
            self.name, self.windows = name, 0
            self.ready = {"first_step_s": 2.0, "full_speed_s": 9.0, "computes_in": "fp32", "micro_batch": 2}

        def window(self) -> dict[str, float]:
            order.append(self.name)
            self.windows += 1
            return {"tokens_per_s": 300.0 if self.name == "ours" else 200.0 + self.windows, "peak_bytes": 10**9}

        def end(self) -> None:
            order.append(f"{self.name} ends")

    monkeypatch.setattr(throughput, "SideProcess", Fake)
    found = throughput.compare("demo", "muon", "cpu", 1, ("ours", "plain"))
    assert order == ["plain", "ours", "ours", "plain"] * 3 + ["plain", "ours", "ours ends", "plain ends"]
    assert found["ratio"] == pytest.approx(300 / 204)
    assert (found["ratio_lowest"], found["ratio_highest"]) == pytest.approx((300 / 207, 300 / 201))
    assert found["ours"]["mfu"] is None
    assert throughput.line(found, "plain") == (
        "| demo, muon, 1 thread | 300 | 204 | 1.47 (1.45 to 1.49) | 1.00 and 1.00 GB"
        " | 2.0 and 2.0 s, full speed after 9 s |"
    )


@pytest.mark.net
@pytest.mark.lab
def test_a_side_is_a_process_that_computes_when_asked() -> None:
    side = throughput.SideProcess("ours", "demo", "muon", "cpu", 1)
    try:
        assert side.ready["computes_in"] == "fp32"
        assert side.window()["tokens_per_s"] > 0
    finally:
        side.end()
