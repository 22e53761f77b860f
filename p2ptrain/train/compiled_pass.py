"""Forward and backward pass of one micro-batch as a native library, called without Python and without the GIL.

``pass_compiler`` writes the library for one shape of model and micro-batch and one device; here it is loaded and called
through AOTInductor's C interface (torch/csrc/inductor/aoti_runtime/interface.h): torch's Python loader holds the GIL
for the whole pass, during which the network thread would stand still. Nothing can recompile: the library takes one
shape, and other micro-batches are computed as before.

On a card the library puts its kernels on torch's current stream, takes memory from torch's allocator, and neither
records events nor waits, so a CUDA graph can record the call.

Inputs of the library, none of which it returns: parameters [...], their gradients (added to), the loss (added to), and
a batch [B, T+1].
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.train import accelerator
from p2ptrain.train.cpp_errors import muted

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder
    from p2ptrain.train.model import FlatModel

VERSION = 1
"""Version of what libraries compute. Raise it whenever the loss of ``train.model`` changes."""


class CompiledPassError(Exception):
    """A compiled library cannot be loaded, or failed; the message is one line without a period."""


@dataclass(frozen=True, slots=True)
class PassShape:
    """Everything that a library depends on, except versions, processor and kind of card."""

    model: str  # canonical JSON of the manifest's model section
    micro_batch: int
    sequence_length: int
    tokens_per_step: int  # divides the loss
    computes_in: str  # ``Placement.computes_in``: fp32 or bfloat16
    threads: int  # of the CPU's loops; 0 on a card
    device: str = "cpu"
    stages: int = 1
    """Stages of the model; the library computes one of them (``compiled_stage``). 1: the whole model."""
    stage: int = 0
    first_block: int = 0
    """First block of the stage, and the one after the last; 0 for the whole model."""
    end_block: int = 0

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

    @property
    def is_stage(self) -> bool:
        """Whether the library is of a pipeline stage, not of a whole model."""
        return self.end_block > 0

    def lock(self) -> str:
        """Return the name of the lock for compiling: the stages of a team on one computer are compiled in turn."""
        return replace(self, stage=0, first_block=0, end_block=0).key() if self.is_stage else self.key()

    def key(self) -> str:
        """Return the name of this shape's library on this machine with these versions; cards of one kind share it."""
        versions = {"version": VERSION, "torch": torch.__version__, "transformers": metadata.version("transformers")}
        facts = {**asdict(self), **versions, "processor": _processor()}
        if self.device != "cpu":
            facts["device"] = accelerator.kernel_facts(torch.device(self.device))
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class NativeLibrary:
    """A library of AOTInductor, loaded. Use it from one thread.

    Raises CompiledPassError, also in its methods.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._device = device
        try:
            self._torch = _torch_functions()
            self._run = ctypes.CDLL(str(path)).AOTInductorModelContainerRunSingleThreaded
            self._quick = quick = ctypes.PyDLL(str(path))
            create, self._last_error = quick.AOTInductorModelContainerCreateWithDevice, quick.AOTInductorGetLastError
        except (OSError, AttributeError) as error:
            raise CompiledPassError(str(error).partition("\n")[0]) from None
        self._container = ctypes.c_void_p()
        with muted():  # container, models that may run at once, device, folder of kernels outside the library
            status = create(ctypes.byref(self._container), ctypes.c_size_t(1), str(device).encode(), None)
        self._check(status)

    def outputs(self) -> int:
        """Return how many tensors a call returns."""
        count = ctypes.c_size_t()
        self._check(self._quick.AOTInductorModelContainerGetNumOutputs(self._container, ctypes.byref(count)))
        return count.value

    def handle(self, tensor: Tensor) -> ctypes.c_void_p:
        """Return a handle of a tensor's memory, which it does not own."""
        handle = ctypes.c_void_p()
        lengths = ctypes.c_int64 * tensor.dim()
        functions = self._torch
        status = functions.aoti_torch_create_tensor_from_blob(
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_int64(tensor.dim()),
            lengths(*tensor.shape),
            lengths(*tensor.stride()),
            ctypes.c_int64(0),
            ctypes.c_int32(getattr(functions, f"aoti_torch_dtype_{str(tensor.dtype).removeprefix('torch.')}")()),
            ctypes.c_int32(getattr(functions, f"aoti_torch_device_type_{tensor.device.type}")()),
            ctypes.c_int32(tensor.device.index or 0),
            ctypes.byref(handle),
        )
        if status:
            raise CompiledPassError("torch made no handle of a tensor")
        return handle

    def call(
        self,
        kept: Sequence[ctypes.c_void_p],
        given: Sequence[ctypes.c_void_p] = (),
        outputs: int = 0,
    ) -> list[ctypes.c_void_p]:
        """Call the library; return handles of its outputs, which own their memory.

        Args:
            kept: handles of the first inputs, which may be used again.
            given: handles of the other inputs, which the call consumes.
            outputs: number of tensors that the library returns.
        """
        inputs = (ctypes.c_void_p * (len(kept) + len(given)))()
        for place, template in enumerate(kept):
            handle = ctypes.c_void_p()
            self._torch.aoti_torch_new_tensor_handle(template, ctypes.byref(handle))
            inputs[place] = handle.value
        for place, handle in enumerate(given, len(kept)):
            inputs[place] = handle.value
        results = (ctypes.c_void_p * outputs)() if outputs else None
        sizes = ctypes.c_size_t(len(inputs)), ctypes.c_size_t(outputs)
        stream = ctypes.c_void_p(accelerator.stream_handle(self._device))
        with muted():  # container, inputs, outputs, stream, executor of operations without C functions
            status = self._run(self._container, inputs, sizes[0], results, sizes[1], stream, None)
        self._check(status)
        return [ctypes.c_void_p(each) for each in results or ()]

    def release(self, handles: Sequence[ctypes.c_void_p]) -> None:
        """Free outputs of a call that no other call consumes."""
        for handle in handles:
            self._torch.aoti_torch_delete_tensor_object(handle)

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._last_error(ctypes.byref(text))
            said = (text.value or b"").decode(errors="replace").strip()
            raise CompiledPassError(said.partition("\n")[0] or f"status {status}")


class CompiledPass:
    """A loaded library, bound to a model's weights and to its gradient. Use it from one thread.

    Args:
        library: written by ``pass_compiler`` for this shape.
        gradient: [P], laid out as ``model.theta``.

    Raises CompiledPassError.
    """

    def __init__(self, library: Path, model: FlatModel, gradient: Tensor, shape: PassShape) -> None:
        device = model.theta.device
        self._batch = torch.zeros(shape.micro_batch, shape.sequence_length + 1, dtype=torch.int64, device=device)
        self._total = torch.zeros((), dtype=model.theta.dtype, device=device)
        parameters = [each.detach() for each in model.module.parameters()]
        gradients = list(model.layout.views(gradient).values())
        self._tensors = [*parameters, *gradients, self._total, self._batch]
        """Owners of the memory that the library reads and writes."""
        self._library = NativeLibrary(library, torch.device(shape.device))
        self._templates = [self._library.handle(each) for each in self._tensors]

    def takes(self, part: Tensor) -> bool:
        return part.shape == self._batch.shape

    def run(
        self,
        part: Tensor,  # [B, T+1] int64
    ) -> Tensor:
        """Add the gradient of the part's share of the mean loss; return that share. Raises CompiledPassError."""
        self._batch.copy_(part)
        self._total.zero_()
        self._library.call(self._templates)
        return self._total.clone()


def _torch_functions() -> ctypes.PyDLL:
    """Return torch's C functions. They are quick, so they keep the GIL: taking it again may cost milliseconds."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))


def _processor() -> str:
    """Return what the compiler's ``-march=native`` depends on; homes may be shared between computers."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    kept = {line for line in lines if line.partition(":")[0].strip() in wanted}
    return "\n".join([platform.machine(), *sorted(kept)])
