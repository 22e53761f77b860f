"""Forward and backward pass of one micro-batch as a native library, called without Python and without the GIL.

``pass_compiler`` writes the library for one shape of model and micro-batch; here it is loaded and called through
AOTInductor's C interface (torch/csrc/inductor/aoti_runtime/interface.h): torch's Python loader holds the GIL for the
whole pass, during which the network thread would stand still. Nothing can recompile: the library takes one shape, and
other micro-batches are computed as before.

Inputs of the library, none of which it returns: parameters [...], their gradients (added to), the loss (added to), and
a batch [B, T+1].
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from p2ptrain.base import files
from p2ptrain.ports import Clock

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder
    from p2ptrain.train.model import FlatModel

PAIRS = 8
"""Pairs of micro-batches, one computed each way, whose times decide. Guess: the spread of times."""
GAIN = 1.03
"""Least ratio of times for which a library is used: more than ``PAIRS`` show by chance. Guess: the ratio's spread."""
VERSION = 1
"""Version of what libraries compute. Raise it whenever the loss of ``train.model`` changes."""


class CompiledPassError(Exception):
    """A compiled library cannot be loaded, or failed; the message is one line without a period."""


@dataclass(frozen=True, slots=True)
class PassShape:
    """Everything that a library depends on, except versions and processor."""

    model: str  # canonical JSON of the manifest's model section
    micro_batch: int
    sequence_length: int
    tokens_per_step: int  # divides the loss
    computes_in: str  # ``Placement.computes_in``: fp32 or bfloat16
    threads: int

    @classmethod
    def of(
        cls,
        description: Decoder,
        micro_batch: int,
        sequence_length: int,
        tokens_per_step: int,
        computes_in: str = "fp32",
    ) -> PassShape:
        text = json.dumps(description.model_dump(mode="json"), sort_keys=True)
        return cls(text, micro_batch, sequence_length, tokens_per_step, computes_in, torch.get_num_threads())

    @property
    def autocast(self) -> torch.dtype | None:
        return None if self.computes_in == "fp32" else torch.bfloat16

    def key(self) -> str:
        """Return the name of this shape's library on this processor with these versions of torch and transformers."""
        versions = {"version": VERSION, "torch": torch.__version__, "transformers": metadata.version("transformers")}
        facts = {**asdict(self), **versions, "processor": _processor()}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def publish(made: Path, library: Path) -> None:
    """Give a library its final name, with its digest in a file beside it. Raises OSError."""
    files.sync(made)
    files.replace(library.with_suffix(".digest"), _digest(made).encode())
    made.replace(library)


def is_whole(library: Path) -> bool:
    """Return whether a library exists and is what was published; half a library would end the process that calls it.

    Raises OSError if it cannot be read.
    """
    try:
        return library.with_suffix(".digest").read_bytes() == _digest(library).encode()
    except FileNotFoundError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compile_choice(
    eager_s: Sequence[float],
    compiled_s: Sequence[float],  # the same number, at least one
) -> float | None:
    """Return by what factor compiled micro-batches are faster, in the median pair; None if it is below ``GAIN``."""
    ratio = statistics.median(eager / compiled for eager, compiled in zip(eager_s, compiled_s, strict=True))
    return ratio if ratio >= GAIN else None


class CompiledPass:
    """A loaded library, bound to a model's weights and to its gradient. Use it from one thread.

    Args:
        library: written by ``pass_compiler`` for this shape.
        gradient: [P], laid out as ``model.theta``.

    Raises CompiledPassError.
    """

    def __init__(self, library: Path, model: FlatModel, gradient: Tensor, shape: PassShape) -> None:
        self._batch = torch.zeros(shape.micro_batch, shape.sequence_length + 1, dtype=torch.int64)
        self._total = torch.zeros((), dtype=model.theta.dtype)
        parameters = [each.detach() for each in model.module.parameters()]
        gradients = list(model.layout.views(gradient).values())
        self._tensors = [*parameters, *gradients, self._total, self._batch]
        """Owners of the memory that the library reads and writes."""
        try:
            self._torch = _torch_functions()
            self._library = ctypes.CDLL(str(library))
            self._quick = ctypes.PyDLL(str(library))
        except (OSError, AttributeError) as error:
            raise CompiledPassError(str(error).partition("\n")[0]) from None
        self._templates = [self._handle(each) for each in self._tensors]
        self._inputs = (ctypes.c_void_p * len(self._tensors))()
        self._container = ctypes.c_void_p()
        create = self._quick.AOTInductorModelContainerCreateWithDevice
        self._check(create(ctypes.byref(self._container), ctypes.c_size_t(1), b"cpu", None))

    def takes(self, part: Tensor) -> bool:
        return part.shape == self._batch.shape

    def run(
        self,
        part: Tensor,  # [B, T+1] int64
    ) -> Tensor:
        """Add the gradient of the part's share of the mean loss; return that share. Raises CompiledPassError."""
        self._batch.copy_(part)
        self._total.zero_()
        for place, template in enumerate(self._templates):  # the call consumes its handles
            handle = ctypes.c_void_p()
            self._torch.aoti_torch_new_tensor_handle(template, ctypes.byref(handle))
            self._inputs[place] = handle.value
        count = ctypes.c_size_t(len(self._inputs))
        run = self._library.AOTInductorModelContainerRun
        self._check(run(self._container, self._inputs, count, None, ctypes.c_size_t(0), None, None))
        return self._total.clone()

    def _handle(self, tensor: Tensor) -> ctypes.c_void_p:
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
            ctypes.c_int32(functions.aoti_torch_device_type_cpu()),
            ctypes.c_int32(0),
            ctypes.byref(handle),
        )
        if status:
            raise CompiledPassError("torch made no handle of a tensor")
        return handle

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._quick.AOTInductorGetLastError(ctypes.byref(text))
            said = (text.value or b"").decode(errors="replace").strip()
            raise CompiledPassError(said.partition("\n")[0] or f"status {status}")


class MicroBatchPass(Protocol):
    """What a ``PassChoice`` needs of a ``CompiledPass``."""

    def takes(self, part: Tensor) -> bool: ...

    def run(self, part: Tensor) -> Tensor: ...


class PassChoice:
    """Computes micro-batches by a library and by the eager pass alternately, then by the faster of the two.

    Both read the same weights and add to the same gradient, so every one of these micro-batches trains.

    Args:
        decided: called once with ``compile_choice``'s result.
        failed: called once if the library fails, with the reason.
    """

    def __init__(
        self,
        compiled: MicroBatchPass,
        decided: Callable[[float | None], None],
        failed: Callable[[str], None],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._compiled: MicroBatchPass | None = compiled
        """None once it is not used again: a CUDA graph holds the memory of its activations."""
        self._decided = decided
        self._failed = failed
        self._clock = clock
        self._times: tuple[list[float], list[float]] = [], []
        self._is_faster = False

    def run(self, part: Tensor, eager: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute a micro-batch; return its share of the loss.

        Raises CompiledPassError if the library failed, which may leave a part of the gradient. It is not used again.
        """
        compiled = self._compiled
        if compiled is None or not compiled.takes(part):
            return eager(part)
        if self._is_faster:
            return self._run_compiled(compiled, part)
        is_compiled = len(self._times[1]) <= len(self._times[0])
        began = self._clock()
        loss = self._run_compiled(compiled, part) if is_compiled else eager(part)
        self._times[is_compiled].append(self._clock() - began)
        if min(map(len, self._times)) > PAIRS:
            eager_s, compiled_s = (each[1:] for each in self._times)  # the first pair fills caches
            ratio = compile_choice(eager_s, compiled_s)
            self._is_faster = ratio is not None
            self._compiled = compiled if self._is_faster else None
            self._decided(ratio)
        return loss

    def give_up(self, why: str) -> None:
        """Report a failure; the library is not used again."""
        if self._compiled is not None:
            self._compiled = None
            self._failed(why)

    def _run_compiled(self, compiled: MicroBatchPass, part: Tensor) -> Tensor:
        try:
            return compiled.run(part)
        except CompiledPassError as error:
            self.give_up(str(error))
            raise


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
