"""Devices that torch can train on: which are there, what they can do, and how much memory they have.

Everything that depends on the kind of device is here: ``cuda`` (NVIDIA, and AMD in a torch for ROCm), ``xpu`` (Intel),
``mps`` (Apple) and ``cpu``. Where a backend lacks a query, the answer is None, and the caller estimates.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from p2ptrain.base.device_names import DEVICE_NAME, DEVICE_WORDS
from p2ptrain.base.errors import DeviceError

logger = logging.getLogger(__name__)

CPU, MPS = torch.device("cpu"), torch.device("mps")
TRITON_CAPABILITY = (7, 0)
"""Least compute capability of NVIDIA's cards for Triton (torch/_inductor/exc.py: GPUTooOldForTriton)."""
KINDS = ("cuda", "xpu", "mps")
"""Kinds of accelerators in the order in which ``auto`` tries them; a machine rarely has two of them."""

_OUT_OF_MEMORY = (
    "out of memory",  # CUDA's and ROCm's drivers, before torch's allocator; MPS; older XPU
    "DefaultCPUAllocator",  # host memory
    "_ALLOC_FAILED",  # libraries of CUDA
    "Invalid buffer size",  # MPS: one tensor larger than Metal allows
    "_OUT_OF_DEVICE_MEMORY",  # Level Zero, below XPU, as the following ones
    "_OUT_OF_HOST_MEMORY",
    "_OUT_OF_RESOURCES",
)
"""Parts of the messages of plain RuntimeErrors that backends raise where memory is short."""


def choose_device(name: str, is_exact: bool = False) -> torch.device:
    """Return the device of this name, or for ``auto`` the first that computes, after checking that it does.

    A card becomes the current device of this thread: autocast queries that one, wherever the tensors are. Unless
    ``is_exact``, its fp32 matrix products are computed in TF32 if it can do so (``allow_tf32``). Raises DeviceError if
    the device is missing or unusable. ``auto`` tries the other cards, then the CPU, instead.
    """
    if DEVICE_NAME.fullmatch(name) is None:
        raise DeviceError(f"There is no device {name!r}; names are {DEVICE_WORDS}.", f"Use {_present()}.")
    if name == "cpu":
        return CPU
    chosen = _first_that_computes() if name == "auto" else _named(name)
    if chosen.type != "cpu":
        _make_current(chosen)
        if not is_exact:
            allow_tf32(chosen)
    return chosen


def expected_device(name: str) -> torch.device:
    """Return the device that ``choose_device`` will choose, as far as counting cards tells, which takes none of their
    memory. Raises DeviceError if the device is missing.
    """
    if DEVICE_NAME.fullmatch(name) is None:
        raise DeviceError(f"There is no device {name!r}; names are {DEVICE_WORDS}.", f"Use {_present()}.")
    if name == "cpu":
        return CPU
    if name == "auto":
        return next((found[0] for kind in KINDS if (found := cards(kind))), CPU)
    return _there(name)


def cards(kind: str) -> list[torch.device]:
    """Return the devices of a kind, whether they compute or not."""
    module = _module(kind)
    if not module.is_available():
        return []
    return [MPS] if kind == "mps" else [torch.device(kind, index) for index in range(module.device_count())]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host ran out of memory, as any backend reports it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """Return whether a backend's message says that memory ran out."""
    return any(part in text for part in _OUT_OF_MEMORY)


@contextlib.contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Convert running out of memory in this block to a DeviceError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            f"The run's model does not fit the free memory of {device}.",
            "Close other programs that use it, or choose another device with --device.",
        ) from error


# --- what a device can do ---------------------------------------------------------------------------------------------


def half_type(device: torch.device) -> torch.dtype:
    """Return the 16-bit type in which a device multiplies matrices fast: bf16, or fp16 where it emulates or lacks bf16.

    NVIDIA's cards before Ampere emulate bf16; macOS before 14 does not have it.
    """
    if device.type in ("cuda", "xpu"):
        with current(device):
            has_bf16 = _module(device.type).is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else torch.float16
    if device.type == "mps":
        return torch.bfloat16 if autocasts(device, torch.bfloat16) else torch.float16
    return torch.bfloat16


def autocasts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether autocast computes matrix products in this type on this device, and right ones."""
    ones = torch.ones(8, 8, device=device)
    try:
        with torch.autocast(device.type, dtype):
            product = ones @ ones
        return product.dtype is dtype and bool((product == 8).all())
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return False


def has_fast_bf16() -> bool:
    """Return whether this machine's CPU multiplies bf16 matrices faster than fp32: by AVX512-BF16 or AMX."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def has_tf32(device: torch.device) -> bool:
    """Return whether a card computes fp32 matrix products in TF32, which has the range of fp32 and 10 bits of fraction.

    NVIDIA's cards since Ampere, AMD's MI300 and Intel's with matrix engines do.
    """
    if device.type not in ("cuda", "xpu"):
        return False
    with current(device):
        return bool(_module(device.type).is_tf32_supported())


def allow_tf32(device: torch.device) -> None:
    """Let a card that has TF32 compute fp32 matrix products in it, several times as fast. The CPU's stay exact.

    Not ``torch.set_float32_matmul_precision``, because it also changes products on the CPU, of which codecs on both
    sides of an exchange must get the same.
    """
    if not has_tf32(device):
        return
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        torch.backends.mkldnn.allow_tf32 = True  # type: ignore[assignment]  # of Intel's cards alone


def triton_fault(device: torch.device) -> str:
    """Return why Triton, by which torch compiles kernels, cannot work on a CUDA or ROCm card; "" if nothing says so."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is missing; a torch installed as https://pytorch.org/get-started says brings it"
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and (major, minor) < TRITON_CAPABILITY:
        least = ".".join(map(str, TRITON_CAPABILITY))
        return f"Triton supports cards from compute capability {least}, and this one has {major}.{minor}"
    return ""


def product_name(device: torch.device) -> str:
    """Return a card's name for people."""
    if device.type == "mps":
        return torch.backends.mps.get_name() or f"Apple {platform.machine()}"
    name: str = _module(device.type).get_device_name(device)
    return name or str(device)


# --- memory -----------------------------------------------------------------------------------------------------------


def shares_host_memory(device: torch.device) -> bool:
    """Return whether tensors on this device take memory of the host, as on the CPU and on integrated chips."""
    if device.type in ("cpu", "mps"):
        return True
    try:
        properties = _module(device.type).get_device_properties(device)
    except (RuntimeError, AssertionError):  # a card that does not answer, or is not there
        return False
    return any(bool(getattr(properties, name, False)) for name in ("is_integrated", "is_integrated_gpu"))


def total_bytes(device: torch.device) -> int:
    """Return the memory that a card has, or of Apple's chips what Metal recommends to use at most."""
    module = _module(device.type)
    if device.type == "mps":
        return int(module.recommended_max_memory())
    return int(module.get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that this process may still allocate on a card; None if the backend does not say.

    Memory that torch has reserved but does not use counts as free.
    """
    module = _module(device.type)
    try:
        if device.type == "mps":
            return max(0, int(module.recommended_max_memory() - module.driver_allocated_memory()))
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    except (RuntimeError, AttributeError):  # drivers of integrated chips lack the query
        return None


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes that this process had allocated at once; None where nothing is counted."""
    if device.type in ("cpu", "mps"):
        return None
    try:
        return int(_module(device.type).max_memory_allocated(device))
    except (RuntimeError, AttributeError):
        return None


def empty_cache(device: torch.device) -> None:
    """Give memory that torch has reserved and does not use back to the device."""
    if device.type != "cpu":
        _module(device.type).empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has computed everything."""
    if device.type == "mps":
        _module("mps").synchronize()
    elif device.type != "cpu":
        _module(device.type).synchronize(device)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a card the current device of this thread for a block."""
    if device.type in ("cpu", "mps"):
        return contextlib.nullcontext()
    manager: AbstractContextManager[Any] = _module(device.type).device(device)
    return manager


# --- choosing ---------------------------------------------------------------------------------------------------------


def _module(kind: str) -> Any:
    """Return torch's module of a kind of device; torch is asked for it each time, because tests replace it."""
    return getattr(torch, kind)


def _there(name: str) -> torch.device:
    """Return the card of this name. Raises DeviceError if it is missing."""
    kind, _, number = name.partition(":")
    there = cards(kind)
    if not there:
        raise DeviceError(f"Device {name} was requested, but {_why_none(kind)}.", f"Fix that, or use {_present()}.")
    index = int(number or 0)
    if index >= len(there):
        raise DeviceError(
            f"Device {name} was requested, but this machine has {len(there)} {kind.upper()} device(s).",
            f"Use {_present()}.",
        )
    return there[index]


def _named(name: str) -> torch.device:
    """Return the card of this name, on which something runs. Raises DeviceError."""
    kind, found = name.partition(":")[0], _there(name)
    if (fault := _fault(found)) is not None:
        lists = " (nvidia-smi lists them)" if kind == "cuda" and torch.version.cuda else ""
        raise DeviceError(
            f"Device {name} was requested, but nothing runs on it ({fault}).",
            f"End other programs that use it{lists}, install a torch that supports the card "
            f"(https://pytorch.org/get-started), or use {_present(without=found)}.",
        )
    return found


def _first_that_computes() -> torch.device:
    """Return the first card that computes, integrated chips of a kind last, or the CPU; log the cards that fail."""
    for kind in KINDS:
        for card in sorted(cards(kind), key=shares_host_memory):
            if (fault := _fault(card)) is None:
                return card
            logger.warning("%s is not used: %s", card, fault)
    return CPU


def _fault(card: torch.device) -> str | None:
    """Return why nothing runs on this card, such as exclusive use by another program or a torch without its kernels."""
    try:
        _make_current(card)
        _compute(card)
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _make_current(card: torch.device) -> None:
    if card.type != "mps":
        _module(card.type).set_device(card)


def _compute(device: torch.device) -> None:
    """Compute a matrix product and its gradient, which need more of a driver's libraries than a sum. Raises
    RuntimeError if that fails or is wrong."""
    ones = torch.ones(8, 8, device=device, requires_grad=True)
    torch.autograd.backward((ones @ ones).sum())
    if ones.grad is None or float(ones.grad.sum()) != 1024:  # 64 times 8 + 8
        raise RuntimeError("it computes a matrix product or its gradient wrongly")


def _present(without: torch.device | None = None) -> str:
    """Return the options by which the devices of this machine are chosen, as "--device cpu or cuda:0"."""
    names = ["cpu", *(str(card) for kind in KINDS for card in cards(kind) if card != without)]
    return f"--device {' or '.join(names)}"


def _why_none(kind: str) -> str:
    """Return why torch has no card of a kind: its build lacks them, or no driver or chip is there."""
    version = torch.version
    built = {"cuda": version.cuda or version.hip, "xpu": version.xpu, "mps": torch.backends.mps.is_built()}[kind]
    if not built:
        return (
            f"this torch was built without {kind.upper()} (https://pytorch.org/get-started prints the install command)"
        )
    tool = {"cuda": "rocminfo" if version.hip else "nvidia-smi", "xpu": "clinfo"}.get(kind)
    if tool is None:
        return "torch finds no MPS device (it needs an Apple chip and macOS 14 or later)"
    return f"torch finds no {kind.upper()} device (is the driver installed? {tool} should list the card)"
