"""Forward and backward pass of one micro-batch by ``torch.compile``.

Loss and gradients are one graph, which adds to the gradients in place: 4 to 6 % faster on a CPU than a compiled loss
with torch's own backward pass, whose results autograd accumulates one by one.

Nothing can recompile: the graph takes one shape and the tensors that it was made with; other micro-batches are computed
eagerly. So there are no guards to evaluate, either, which took a twentieth of the demo's pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.train import accelerator
from p2ptrain.train.model import summed_loss

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder
    from p2ptrain.train.model import FlatModel


IN_GRAPHS = "in_graphs"
"""Name of a file in the cache of a pass that is faster as a CUDA graph, and of the question to the compiler."""


class CompiledPassError(Exception):
    """A compiled pass cannot be made, or failed; the message is one line without a period."""


@dataclass(frozen=True, slots=True)
class PassShape:
    """Everything that a compiled pass depends on, except versions, processor and kind of card."""

    model: str  # canonical JSON of the manifest's model section
    micro_batch: int
    sequence_length: int
    tokens_per_step: int  # divides the loss
    computes_in: str  # ``Placement.computes_in``: fp32 or bfloat16
    threads: int  # of the CPU's loops; 0 on a card
    device: str

    @classmethod
    def of(
        cls,
        description: Decoder,
        micro_batch: int,
        sequence_length: int,
        tokens_per_step: int,
        computes_in: str = "fp32",
        device: torch.device = accelerator.CPU,
    ) -> PassShape:
        text = json.dumps(description.model_dump(mode="json", exclude={"init"}), sort_keys=True)
        threads = torch.get_num_threads() if device.type == "cpu" else 0
        return cls(text, micro_batch, sequence_length, tokens_per_step, computes_in, threads, str(device))

    @property
    def autocast(self) -> torch.dtype | None:
        return None if self.computes_in == "fp32" else torch.bfloat16

    def key(self) -> str:
        """Return the name of what is compiled for this shape on this machine with these versions."""
        versions = {name: metadata.version(name) for name in ("p2ptrain", "torch", "transformers")}
        facts = {**asdict(self), **versions, "processor": _processor()}
        if self.device != "cpu":
            facts["card"] = accelerator.product_name(torch.device(self.device))
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class _LossAndGradient(torch.nn.Module):
    """What is compiled. A CUDA graph copies no module's parameters or buffers, so the gradients are buffers."""

    def __init__(self, model: FlatModel, gradient: Tensor, shape: PassShape) -> None:
        super().__init__()
        self.summed = _SummedLoss(model, shape.autocast)
        self.tokens = shape.tokens_per_step
        for number, part in enumerate(model.layout.views(gradient).values()):
            self.register_buffer(f"gradient{number}", part, persistent=False)

    def forward(
        self,
        part: Tensor,  # [b, T+1] int64
    ) -> Tensor:
        """Add the gradient of the part's share of the mean loss; return that share."""

        def loss_of(weights: dict[str, Tensor]) -> Tensor:
            summed: Tensor = torch.func.functional_call(self.summed, weights, (part,), tie_weights=True)
            return summed / self.tokens

        gradients, loss = torch.func.grad_and_value(loss_of)(dict(self.summed.named_parameters()))
        for number, found in enumerate(gradients.values()):
            getattr(self, f"gradient{number}").add_(found)
        return loss


class _SummedLoss(torch.nn.Module):
    def __init__(self, model: FlatModel, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.module = model.module
        self.autocast = autocast

    def forward(self, part: Tensor) -> Tensor:
        return summed_loss(self.module, part, self.autocast)


class CompiledPass:
    """A pass that the first call compiles: in seconds if the cache has it.

    Args:
        gradient: [P], laid out as ``model.theta``; both must stay where they are.
        in_graphs: whether a card replays the kernels as a CUDA graph.
    """

    def __init__(self, model: FlatModel, gradient: Tensor, shape: PassShape, in_graphs: bool = False) -> None:
        self._size = (shape.micro_batch, shape.sequence_length + 1)
        self._is_made = False
        self._compiled = torch.compile(  # type: ignore[call-overload]  # declared without ``isolate_recompiles``
            _LossAndGradient(model, gradient, shape),
            fullgraph=True,
            dynamic=False,
            isolate_recompiles=True,  # each model has a graph of its own
            options={
                "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,  # ``takes`` checks the shape
                "compile_threads": 1,
                "cpp_cache_precompile_headers": False,  # 280 MB in the system's folder of temporary files
                "cpp_wrapper": shape.device == "cpu",  # 4 % faster there; a card would need CUDA's headers
                "triton.cudagraphs": in_graphs,
            },
        )

    def takes(self, part: Tensor) -> bool:
        return part.shape == self._size

    def run(
        self,
        part: Tensor,  # [b, T+1] int64
    ) -> Tensor:
        """Add the gradient of the part's share of the mean loss; return that share. Raises CompiledPassError."""
        try:
            with torch.no_grad(), contextlib.nullcontext() if self._is_made else warnings.catch_warnings():
                if not self._is_made:
                    warnings.simplefilter("ignore")  # torch's own, about its own code
                loss: Tensor = self._compiled(part)
            self._is_made = True
            return loss.clone()
        except Exception as error:  # of torch's compiler there are many
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise CompiledPassError(f"{type(error).__name__}: {lines[0] if lines else ''}") from error


def use(cache: Path) -> None:
    """Let torch's compiler in this process use a folder as its cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    os.environ.pop("TRITON_CACHE_DIR", None)  # torch then chooses one in that folder


def _processor() -> str:
    """Return what the compiler's ``-march=native`` depends on; homes may be shared between computers."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    kept = {line for line in lines if line.partition(":")[0].strip() in wanted}
    return "\n".join([platform.machine(), *sorted(kept)])
