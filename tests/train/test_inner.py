"""Inner steps: plain AdamW bitwise, plain Muon up to rounding; resumable; smaller batches if memory runs out."""

import math
from types import SimpleNamespace

import pytest
import torch
from families import DESCRIPTIONS

from p2ptrain.base.errors import DeviceError
from p2ptrain.train import inner
from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.model import build_module
from p2ptrain.train.schedule import learning_rate


def run(task, steps, start=0):
    tokens = task._training.tokens_per_step
    return [task.inner_step((start + step) * tokens).loss for step in range(steps)]


def plain_loop(tiny, steps, peer="alice"):
    """Return the result of a plain loop: a module with its own tensors, torch's optimizers."""
    manifest = tiny.manifest
    training = manifest.training
    module = build_module(manifest.model, manifest.run.seed)
    parameters = list(module.parameters())
    hidden = [
        p for name, p in module.named_parameters() if name.endswith("_proj.weight") and training.optimizer == "muon"
    ]
    rest = [p for p in parameters if not any(p is other for other in hidden)]
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": training.weight_decay},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            fused=True,
        )
    ]
    if hidden:
        optimizers.append(
            torch.optim.Muon(hidden, weight_decay=training.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        )
    losses = []
    for step in range(steps):
        batch = tiny.corpus.step_batch(manifest.run.seed, peer, step, training.sequences_per_step)
        hidden = module.base_model(batch[:, :-1]).last_hidden_state.flatten(0, 1)
        tokens = training.tokens_per_step
        loss = summed_cross_entropy(hidden, module.get_output_embeddings().weight, batch[:, 1:].flatten()) / tokens
        module.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, training.gradient_clip)
        rate = learning_rate((step + 1) * training.tokens_per_step, training, manifest.run.tokens)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        losses.append(loss.item())
    return module, losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_peer_alone_is_plain_training(tiny_run, optimizer, tied):
    changes = {"model__config__tie_word_embeddings": tied, "training__optimizer": optimizer}
    tiny = tiny_run(**changes, training__learning_rate=3e-3)
    task = tiny.task(muon=torch.bfloat16)  # as torch's
    losses = run(task, 12)
    module, expected_losses = plain_loop(tiny, 12)
    views = task.model.layout.views(task.theta)
    if optimizer == "muon":  # products of stacked matrices in bf16 are rounded differently
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name, parameter in module.named_parameters():
            assert (views[name] - parameter).norm() < 0.01 * parameter.norm(), name
        return
    assert losses == expected_losses
    for name, parameter in module.named_parameters():
        assert torch.equal(views[name], parameter), name


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_every_family_alone_is_plain_training(tiny_run, architecture):
    model = {"architecture": architecture, "config": {**DESCRIPTIONS[architecture], "vocab_size": 256}}
    tiny = tiny_run(model=model, training__optimizer="adamw")
    task = tiny.task()
    losses = run(task, 2)
    module, expected_losses = plain_loop(tiny, 2)
    assert losses == expected_losses
    views = task.model.layout.views(task.theta)
    for name, parameter in module.named_parameters():
        assert torch.equal(views[name], parameter), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns(tiny_run, optimizer):
    losses = run(tiny_run(training__optimizer=optimizer).task(), 60)
    assert losses[-1] < 0.8 * losses[0]


def test_accumulation_changes_rounding_only(tiny_run):
    tiny = tiny_run()
    whole, parts = tiny.task(micro_batch=4), tiny.task(micro_batch=3)
    for one, other in zip(run(whole, 5), run(parts, 5), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert torch.allclose(whole.theta, parts.theta, atol=1e-3)


def test_a_step_reports_the_tokens_of_the_manifest(tiny_run):
    assert tiny_run().task(micro_batch=1).inner_step(0.0).tokens == 64


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_task_goes_on_as_if_never_stopped(tiny_run, optimizer):
    tiny = tiny_run(training__optimizer=optimizer)
    steady = tiny.task()
    run(steady, 3)
    steady.reset(4)  # so that a new warm-up is under way, too
    run(steady, 2, start=3)
    saved = {name: tensor.clone() for name, tensor in steady.state_dict().items()}
    theta = steady.theta.clone()
    resumed = tiny.task()
    resumed.theta.copy_(theta)
    resumed.load_state_dict(saved)
    assert run(resumed, 4, start=5) == run(steady, 4, start=5)
    assert torch.equal(resumed.theta, steady.theta)
    assert resumed.step == steady.step == 9


@pytest.mark.parametrize("missing", ["first_moment", "second_moment", "counters"])
def test_a_state_that_does_not_fit_changes_nothing(tiny_run, missing):
    task = tiny_run().task()
    run(task, 2)
    state = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    with pytest.raises(KeyError):
        task.load_state_dict({name: tensor for name, tensor in state.items() if name != missing})
    with pytest.raises(ValueError, match="belong"):
        task.load_state_dict({**state, missing: torch.zeros(3, dtype=state[missing].dtype)})
    assert all(torch.equal(tensor, state[name]) for name, tensor in task.state_dict().items())


def test_peers_read_different_sequences(tiny_run):
    tiny = tiny_run()
    assert run(tiny.task("alice"), 1) != run(tiny.task("bob"), 1)


def test_coverage_is_counted(tiny_run):
    task = tiny_run().task()
    run(task, 3)
    assert task.coverage == pytest.approx(12 / task._corpus.train_sequences)


def test_after_a_reset_the_rate_rises_again_and_the_data_go_on(tiny_run):
    task = tiny_run(training__schedule="constant", training__warmup_tokens=0).task()
    run(task, 3)
    task.reset(4)
    assert not task.state_dict()["first_moment"].any()
    rates = []
    for _ in range(6):
        task.inner_step(0.0)
        rates.append(task.learning_rate / task._training.learning_rate)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert task.step == 9
    assert task._optimizer.steps == 6


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_reset_task_equals_a_new_one_on_the_same_weights(tiny_run, optimizer):
    tiny = tiny_run(training__schedule="constant", training__warmup_tokens=0, training__optimizer=optimizer)
    used, new = tiny.task(), tiny.task()
    run(used, 3)
    used.reset(0)
    new.theta.copy_(used.theta)
    new.step = used.step
    assert run(used, 3) == run(new, 3)
    assert torch.equal(used.theta, new.theta)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_moves_nothing(tiny_run, optimizer):
    task = tiny_run(training__optimizer=optimizer).task()
    run(task, 2)
    theta, moment = task.theta.clone(), task.state_dict()["first_moment"].clone()
    scale = task.model.layout.views(task.theta)["model.norm.weight"]
    kept = scale[0].item()
    scale[0] = float("nan")
    assert math.isnan(task.inner_step(0.0).loss)
    scale[0] = kept
    assert torch.equal(task.theta, theta)
    assert torch.equal(task.state_dict()["first_moment"], moment)
    assert task.step == 3
    assert math.isfinite(task.inner_step(0.0).loss)


def out_of_memory_above(limit, monkeypatch):
    """Let the device hold at most ``limit`` sequences; yield the sizes of the batches tried."""
    real, tried = inner.summed_loss, []

    def loss(module, batch, *how):
        tried.append(batch.clone())
        if len(batch) > limit:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)")
        return real(module, batch, *how)

    monkeypatch.setattr(inner, "summed_loss", loss)
    return tried


def test_out_of_memory_halves_the_micro_batch_and_loses_no_token(tiny_run, monkeypatch):
    tiny = tiny_run()
    reference = tiny.task(micro_batch=1)
    expected = run(reference, 3)
    tried = out_of_memory_above(1, monkeypatch)
    task = tiny.task(micro_batch=4)
    assert run(task, 3) == expected
    assert torch.equal(task.theta, reference.theta)
    assert task.micro_batch == 1
    assert [len(batch) for batch in tried] == [4, 2] + [1] * 12


def test_out_of_memory_in_the_middle_of_a_step_leaves_no_half_gradient(tiny_run, monkeypatch):
    tiny = tiny_run()
    reference = tiny.task(micro_batch=1)
    run(reference, 1)
    real, calls = inner.summed_loss, []

    def loss(module, batch, *how):
        calls.append(len(batch))
        if calls == [2, 2]:
            raise torch.OutOfMemoryError("simulated")
        return real(module, batch, *how)

    monkeypatch.setattr(inner, "summed_loss", loss)
    task = tiny.task(micro_batch=2)
    run(task, 1)
    assert calls == [2, 2, 1, 1, 1, 1]
    assert torch.equal(task.theta, reference.theta)


def test_a_card_clips_by_the_norm_of_the_flat_vector(tiny_run, monkeypatch):
    task = tiny_run().task()
    task._backward(task._batches.at(0).sequences)
    before = task._gradient.clone()
    expected = task._clip()
    clipped = task._gradient.clone()
    assert clipped.norm() < 0.99 * before.norm()
    task._gradient.copy_(before)
    monkeypatch.setattr(type(task), "theta", SimpleNamespace(device=torch.device("cuda")))
    torch.testing.assert_close(task._clip(), expected)
    torch.testing.assert_close(task._gradient, clipped)
    task._gradient.fill_(1e-6)  # short enough
    task._clip()
    assert bool((task._gradient == 1e-6).all())


def test_out_of_memory_with_one_sequence_recomputes_activations(tiny_run, monkeypatch):
    tiny = tiny_run()
    reference = tiny.task(micro_batch=1)
    expected = run(reference, 2)
    real, calls = inner.summed_loss, []

    def loss(module, batch, *how):
        calls.append(module.model.layers[0].gradient_checkpointing)
        if not calls[-1]:
            raise torch.OutOfMemoryError("simulated")
        return real(module, batch, *how)

    monkeypatch.setattr(inner, "summed_loss", loss)
    task, failures = tiny.task(micro_batch=2), []
    task.compiled, task._on_compiled_failure = SimpleNamespace(takes=lambda part: False), failures.append
    assert run(task, 2) == expected
    assert (task.compiled, failures) == (None, ["memory is short"])
    assert calls == [False, False] + [True] * 8
    with pytest.raises(CompiledPassError, match="would keep activations"):
        task.pass_shape(tiny.manifest.model)
    assert torch.equal(task.theta, reference.theta)


def test_a_model_that_does_not_fit_is_the_devices_fault(tiny_run, monkeypatch):
    out_of_memory_above(0, monkeypatch)
    task = tiny_run().task()
    with pytest.raises(DeviceError, match="does not fit cpu: one sequence of 16 tokens"):
        task.inner_step(0.0)
    assert task.step == 0
    assert not task.state_dict()["first_moment"].any()


def test_autocast_leaves_weights_and_moments_in_fp32(tiny_run):
    tiny = tiny_run()
    plain, mixed = tiny.task(), tiny.task(autocast=torch.bfloat16)
    plain_losses, mixed_losses = run(plain, 3), run(mixed, 3)
    assert mixed_losses != plain_losses
    assert mixed_losses == pytest.approx(plain_losses, rel=0.02)
    assert mixed.theta.dtype == mixed.state_dict()["second_moment"].dtype == torch.float32


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("cosine", {0: 0.0, 50: 0.5, 100: 1.0, 550: 0.55, 1000: 0.1, 2000: 0.1}),
        ("constant", {0: 0.0, 50: 0.5, 100: 1.0, 550: 1.0, 1000: 1.0}),
        ("wsd", {0: 0.0, 100: 1.0, 800: 1.0, 900: 0.55, 1000: 0.1, 2000: 0.1}),
    ],
)
def test_schedules(tiny_run, schedule, points):
    changes = {
        "training__schedule": schedule,
        "training__warmup_tokens": 100,
        "training__learning_rate": 1.0,
        "training__final_learning_rate_fraction": 0.1,
    }
    training = tiny_run(**changes).manifest.training
    for progress, expected in points.items():
        assert learning_rate(progress, training, 1000) == pytest.approx(expected)


def test_schedules_survive_their_edges(tiny_run):
    for schedule in ("cosine", "constant", "wsd"):
        none = tiny_run(training__schedule=schedule, training__warmup_tokens=0).manifest.training
        assert learning_rate(0, none, 6400) == none.learning_rate
        all_warm = tiny_run(training__schedule=schedule, training__warmup_tokens=6400).manifest.training
        assert math.isfinite(learning_rate(6400, all_warm, 6400))
