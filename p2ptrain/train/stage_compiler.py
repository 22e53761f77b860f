"""Compilation of a pipeline stage's passes into libraries; ``pass_compiler`` calls it in its process.

The last stage computes a micro-batch backward right after forward, so its library computes both at once, as that of a
whole model does. The others compute further micro-batches forward in between, and get a library for each direction.
``make_fx`` traces both into one graph, and torch's partitioner (min-cut: Chen et al., as in ``torch.compile``) decides
which activations the forward pass returns for the backward pass and which that computes again.

Inputs of the libraries, of which none is returned::

    last      weights, gradients (added to), loss (added to); input, its gradient (written; not on the first), targets
    forward   weights; input, hidden states (written)       returns the activations to keep
    backward  weights, gradients (added to); input, gradient of hidden states, gradient of the input (written; not on
              the first), activations

Dimension letters: B sequences of a micro-batch, T tokens a sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2ptrain.train.compiled_pass import PassShape
from p2ptrain.train.compiled_stage import CompiledStage, stage_weights
from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.libraries import backward_library
from p2ptrain.train.stages import StageModel, StagePass, StageRange

Compile = Callable[[torch.fx.GraphModule, tuple[Tensor, ...], Path], None]
"""Writes the library of a graph with such inputs."""


def stage_range(shape: PassShape) -> StageRange:
    """Return the stage that a shape is of."""
    return StageRange(shape.stage, shape.stages, range(shape.first_block, shape.end_block))


def compile_stage(model: StageModel, shape: PassShape, library: Path, compile_graph: Compile) -> None:
    """Write the library of the last stage, or the two of another one: ``library`` and ``backward_library(library)``."""
    if model.stage.is_last:
        compile_graph(*_traced(_last(model, shape), _last_inputs(model, shape)), library)
        return
    forward, backward = _partitioned(model, shape)
    weights, count = stage_weights(model), len(stage_weights(model))
    gradients = tuple(map(torch.zeros_like, weights))
    given, hidden = _given(model, shape), _hidden(model, shape)
    returned = [] if model.stage.is_first else [torch.zeros_like(given)]
    names = {node.name: place for place, node in enumerate(_placeholders(forward))}
    results = _results(forward)
    kept = [each.name for each in results[1:] if each.name not in names]

    def compute_forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        found = forward(*inputs[:-1])
        inputs[-1].copy_(found[0])
        return tuple(value for value, node in zip(found[1:], results[1:], strict=True) if node.name not in names)

    def compute_backward(*inputs: Tensor) -> tuple[()]:
        own, sums, rest = inputs[:count], inputs[count : 2 * count], inputs[2 * count :]
        places = {**dict(zip(names, (*own, rest[0]), strict=True)), "tangents_1": rest[1]}
        places |= zip(kept, rest[2 + len(returned) :], strict=True)
        found = backward(*(places[node.name] for node in _placeholders(backward)))
        for total, part in zip(sums, found[:count], strict=True):
            total.add_(part)
        if returned:
            rest[2].copy_(found[count])
        return ()

    graph, inputs = _traced(compute_forward, (*weights, given, hidden))
    compile_graph(graph, inputs, library)
    values = tuple(_example(node) for node in results[1:] if node.name not in names)
    graph, inputs = _traced(compute_backward, (*weights, *gradients, given, hidden, *returned, *values))
    compile_graph(graph, inputs, backward_library(library))


def _last(model: StageModel, shape: PassShape) -> Callable[..., tuple[()]]:
    stage_pass, names = StagePass(model, shape.autocast), list(_names(model))
    is_first = model.stage.is_first

    def compute(*inputs: Tensor) -> tuple[()]:
        count = len(names)
        weights, sums, total = inputs[:count], inputs[count : 2 * count], inputs[2 * count]
        given, *returned, targets = inputs[2 * count + 1 :]
        parameters = [each.detach().requires_grad_() for each in weights]
        source = given if is_first else given.detach().requires_grad_()
        loss = _computed(model, stage_pass, names, parameters, source, targets) / shape.tokens_per_step
        wanted = parameters if is_first else [*parameters, source]
        found = torch.autograd.grad(loss, wanted)
        for each, part in zip(sums, found[:count], strict=True):
            each.add_(part)
        if returned:
            returned[0].copy_(found[count])
        total.add_(loss.detach())
        return ()

    return compute


def _last_inputs(model: StageModel, shape: PassShape) -> tuple[Tensor, ...]:
    weights, given = stage_weights(model), _given(model, shape)
    returned = [] if model.stage.is_first else [torch.zeros_like(given)]
    device = model.flat.theta.device
    total = torch.zeros((), dtype=model.flat.theta.dtype, device=device)
    return (*weights, *map(torch.zeros_like, weights), total, given, *returned, _ids(shape, device))


def _partitioned(model: StageModel, shape: PassShape) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return graphs of the forward pass and of the backward pass; the former's first output are hidden states."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    stage_pass, names, is_first = StagePass(model, shape.autocast), list(_names(model)), model.stage.is_first

    def joint(*inputs: Tensor) -> tuple[Tensor, ...]:
        *weights, given, slope = inputs
        parameters = [each.detach().requires_grad_() for each in weights]
        source = given if is_first else given.detach().requires_grad_()
        hidden = _computed(model, stage_pass, names, parameters, source)
        wanted = parameters if is_first else [*parameters, source]
        return (hidden.detach(), *torch.autograd.grad(hidden, wanted, slope.to(hidden.dtype)))

    examples = (*stage_weights(model), _given(model, shape), _hidden(model, shape))
    graph, inputs = _traced(joint, examples, select_decomp_table())
    for place, node in enumerate(_placeholders(graph)):  # names by which the partitioner knows them
        is_slope = place == len(inputs) - 1
        node.name = node.target = "tangents_1" if is_slope else f"primals_{place + 1}"
    graph.recompile()
    return min_cut_rematerialization_partition(graph, inputs, num_fwd_outputs=1)


def _computed(
    model: StageModel,
    stage_pass: StagePass,
    names: Sequence[str],
    weights: Sequence[Tensor],
    given: Tensor,  # [B, T] or [B, T, D]
    targets: Tensor | None = None,  # [B, T]; None: not the last stage
) -> Tensor:
    """Return the hidden states, or the summed loss, of the stage with other weights in place of its own."""
    module = _StageFunction(model, stage_pass)
    result: Tensor = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (given, targets))
    return result


class _StageFunction(torch.nn.Module):
    def __init__(self, model: StageModel, stage_pass: StagePass) -> None:
        super().__init__()
        self.module = model.flat.module
        self.guest = None if model.guest is None else torch.nn.Parameter(model.guest.detach())
        self._model = model
        self._pass = stage_pass

    def forward(self, given: Tensor, targets: Tensor | None) -> Tensor:
        hidden = self._pass(given)
        if targets is None:
            return hidden
        output = self._model.output if self.guest is None else self.guest
        return summed_cross_entropy(hidden.flatten(0, 1), output, targets.flatten(), self._pass.autocast)


def _names(model: StageModel) -> Sequence[str]:
    """Return the names in ``_StageFunction`` of ``stage_weights``."""
    names = [f"module.{name}" for name, _ in model.flat.module.named_parameters()]
    return names if model.guest is None else [*names, "guest"]


def _given(model: StageModel, shape: PassShape) -> Tensor:
    return _ids(shape, model.flat.theta.device) if model.stage.is_first else _hidden(model, shape)


def _ids(shape: PassShape, device: torch.device) -> Tensor:
    return torch.zeros(shape.micro_batch, shape.sequence_length, dtype=torch.int64, device=device)


def _hidden(model: StageModel, shape: PassShape) -> Tensor:
    theta, width = model.flat.theta, model.flat.module.config.hidden_size
    return torch.zeros(shape.micro_batch, shape.sequence_length, width, dtype=theta.dtype, device=theta.device)


def _traced(
    compute: Callable[..., Any], inputs: tuple[Tensor, ...], decompositions: Any = None
) -> tuple[torch.fx.GraphModule, tuple[Tensor, ...]]:
    from torch.fx.experimental.proxy_tensor import make_fx

    made = make_fx(compute, decompositions, tracing_mode="fake", _allow_non_fake_inputs=True)
    return made(*inputs), inputs


def _placeholders(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _results(graph: torch.fx.GraphModule) -> Sequence[torch.fx.Node]:
    returned: Any = graph.graph.output_node().args[0]
    found: Sequence[torch.fx.Node] = returned
    return found


def _example(node: torch.fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def difference(model: StageModel, shape: PassShape, library: Path) -> float:
    """Return the largest relative difference between libraries and usual pass: of results, and of both gradients.

    The usual pass computes the whole micro-batch. Two micro-batches are on their way at once, as in 1F1B.
    """
    device, random = model.flat.theta.device, torch.Generator().manual_seed(1)
    weights, total = stage_weights(model), torch.zeros((), device=device)
    for each in weights:
        each.grad = torch.zeros_like(each)
    compiled = CompiledStage(library, model, total, shape)
    stage_pass, vocabulary = StagePass(model, shape.autocast), model.flat.module.config.vocab_size
    size = shape.micro_batch, shape.sequence_length
    width = model.flat.module.config.hidden_size

    def numbers() -> Tensor:
        return torch.randn(*size, width, generator=random).to(device)

    def ids() -> Tensor:
        return torch.randint(vocabulary, size, generator=random).to(device)

    cases = [(ids() if model.stage.is_first else numbers(), ids(), numbers()) for _ in range(2)]
    begun = [compiled.forward(given, targets) for given, targets, _ in cases]
    ended = [compiled.backward(each, slope) for each, (_, _, slope) in zip(begun, cases, strict=True)]
    theirs = [each.grad.clone() for each in weights if each.grad is not None]
    for each in weights:
        each.grad = None
    worst, loss = 0.0, torch.zeros((), device=device)
    for (given, targets, slope), own, returned in zip(cases, begun, ended, strict=True):
        source = given if model.stage.is_first else given.clone().requires_grad_()
        hidden = stage_pass(source)
        if model.stage.is_last:
            part = summed_cross_entropy(hidden.flatten(0, 1), model.output, targets.flatten(), shape.autocast)
            part = part / shape.tokens_per_step
            part.backward()
            loss += part.detach()
        else:
            torch.autograd.backward(hidden, slope.to(hidden))
            worst = max(worst, _apart(own.hidden, hidden.detach().float()))
        if returned is not None:
            worst = max(worst, _apart(returned, source.grad))
    if model.stage.is_last:
        worst = max(worst, _apart(total, loss))
    ours = [each.grad for each in weights if each.grad is not None]
    flat = [torch.cat([each.flatten() for each in gradients]) for gradients in (theirs, ours)]
    return max(worst, _apart(*flat))


def _apart(found: Tensor | None, wanted: Tensor | None) -> float:
    """Return the relative difference of two tensors."""
    assert found is not None
    assert wanted is not None
    return ((found - wanted).norm() / wanted.norm()).item()
