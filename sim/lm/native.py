"""Losses and gradients of one Llama by ``native.cpp``, where a C++ compiler exists and the shape suits it.

A model of a hundred thousand weights spends most of its time between products: measured with steps of 128 tokens on one
core of an EPYC with AVX-512, 4.3 us a token here and 17 us in ``sim.lm.stacked``, both in fp32.

On one computer, results are bitwise equal in every run. They differ by rounding from those of ``sim.lm.stacked`` (6e-7
of the gradient, measured), and between compilers and processors. Training enlarges such differences: after 300 steps of
AdamW, losses of eight peers are .02 to .06 apart, here, in torch, and in torch with initial weights moved by 1e-7.

The library is compiled once per process, in four to eight seconds (measured on a busy machine), and is not kept, so it
is never that of another version.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from p2ptrain.train.compiling import compiler_program
from sim.lm.kernels import fixed
from sim.lm.stacked import StackedLlama

SOURCE = Path(__file__).with_suffix(".cpp")

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
"""Without errno and traps, loops with roots and comparisons become vector instructions; sums keep their order."""

COMPILER_S = 120.0
"""Seconds after which the compiler is stopped: twenty times the usual."""

PASS_TOKENS = 256
"""Tokens computed at once, further sequences are accumulated. Measured with 123 thousand weights: 4.4, 4.3, 4.6 and 4.9
us a token at 64, 128, 256 and 512; activations of more tokens exceed the second-level cache of 1 MB."""

MOST_LAYERS = 64
"""As in ``native.cpp``."""

PARAMETERS = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
"""The first parameter of each product or norm of a block: q, k and v, and gate and up, lie without a gap."""


class _BlockOffsets(ctypes.Structure):
    """Offsets of ``PARAMETERS`` in the flat vector."""

    _fields_ = [(name, ctypes.c_int64) for name in PARAMETERS]


class _NativeShape(ctypes.Structure):
    """Shape of a model, and where its parameters are: ``Shape`` of ``native.cpp``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "heads", "head_size", "inner", "vocabulary", "tokens")),
        ("embedding", ctypes.c_int64),
        ("norm", ctypes.c_int64),
        ("blocks", ctypes.POINTER(_BlockOffsets)),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """Compile and load ``native.cpp``; None without a compiler that can."""
    compiler = compiler_program(os.environ)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="p2ptrain-") as folder:
        made = Path(folder) / "native.so"
        try:
            subprocess.run([compiler, *FLAGS, SOURCE, "-o", made], check=True, capture_output=True, timeout=COMPILER_S)
            loaded = ctypes.CDLL(str(made))
        except (OSError, subprocess.SubprocessError):
            return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    loaded.memory_floats.argtypes = pointer, integer
    loaded.memory_floats.restype = integer
    loaded.loss.argtypes = pointer, pointer, pointer, integer, pointer
    loaded.loss.restype = ctypes.c_double
    loaded.accumulate.argtypes = *loaded.loss.argtypes, pointer, ctypes.c_float
    loaded.accumulate.restype = ctypes.c_double
    return loaded


class NativeLlama:
    """The losses and gradients of one weight vector at a time, for sequences of one length."""

    def __init__(self, library: ctypes.CDLL, model: StackedLlama, tokens: int) -> None:
        self._library = library
        rotation = fixed(
            model.heads, model.head_size, model.rope_theta, tokens, torch.device("cpu"), torch.float32
        ).rotation[:, 0]  # [T, D/2]
        self._rotation = rotation.real.T.contiguous(), rotation.imag.T.contiguous()
        offsets = dict(zip(model.layout.names, model.layout.offsets, strict=True))
        self._blocks = (_BlockOffsets * model.layers)(
            *(
                _BlockOffsets(*(offsets[f"model.layers.{number}.{name}.weight"] for name in PARAMETERS))
                for number in range(model.layers)
            )
        )
        self._shape = _NativeShape(
            model.layers,
            model.heads,
            model.head_size,
            model.inner,
            model.vocabulary,
            tokens,
            offsets["model.embed_tokens.weight"],
            offsets["model.norm.weight"],
            self._blocks,
            *(part.data_ptr() for part in self._rotation),
            model.epsilon,
        )
        self._address = ctypes.addressof(self._shape)
        self._sequences = max(1, PASS_TOKENS // tokens)
        self._memory = torch.empty(library.memory_floats(self._address, self._sequences))

    @classmethod
    def of(cls, model: StackedLlama, tokens: int) -> NativeLlama | None:
        """Make the native form of a model, or None without a compiler, or if the shape is not one of whole tiles."""
        tiles = (model.hidden, 32), (model.inner, 32), (tokens, 32), (model.head_size, 8), (model.vocabulary, 8)
        if any(size % tile for size, tile in tiles) or model.layers > MOST_LAYERS:
            return None
        compiled = library()
        return None if compiled is None else cls(compiled, model, tokens)

    def loss(
        self,
        theta: Tensor,  # [P] fp32
        batch: Tensor,  # [B, T+1] int64
    ) -> float:
        """Return the cross entropy in nats, summed over the B*T predicted tokens."""
        memory = self._memory.data_ptr()
        return sum(
            self._library.loss(self._address, theta.data_ptr(), part.data_ptr(), len(part), memory)
            for part in batch.split(self._sequences)
        )

    def accumulate(
        self,
        theta: Tensor,  # [P] fp32
        gradient: Tensor,  # [P] fp32, added to
        batch: Tensor,  # [B, T+1] int64
        weight: float,  # weight of this batch in the gradient: 1/tokens for the mean loss
    ) -> float:
        """Return ``loss``; add its gradient, times ``weight``, to ``gradient``."""
        to = self._memory.data_ptr(), gradient.data_ptr(), weight
        return sum(
            self._library.accumulate(self._address, theta.data_ptr(), part.data_ptr(), len(part), *to)
            for part in batch.split(self._sequences)
        )
