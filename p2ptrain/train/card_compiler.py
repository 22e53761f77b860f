"""What the compiler of libraries for cards needs beside torch and Triton: headers, the driver to link with, memory.

The package of Triton for NVIDIA's cards holds CUDA's headers, except ``nv/target``, by which others choose between host
and device; of these, libraries for torch compile the host's part alone. So no CUDA toolkit is necessary.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

import torch

from p2ptrain.train.autofit import CARD_MEMORY_FRACTION

NV_TARGET = """\
#define NV_IF_TARGET(...)
#define NV_IF_ELSE_TARGET(condition, device, host) host
"""
DRIVER = "libcuda.so"


def prepare(device: torch.device, workspace: Path, environment: MutableMapping[str, str]) -> None:
    """Let a C++ compiler find what it needs, and limit this process to a part of the card's free memory.

    Call it before ``torch.utils.cpp_extension`` is imported, which reads CUDA_HOME. A CUDA_HOME of the user's stays.

    Args:
        device: of type cuda, NVIDIA's or AMD's.
        environment: of this process.
    """
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(CARD_MEMORY_FRACTION * free / total, device)
    environment["TRITON_CACHE_DIR"] = str(workspace / "triton")
    found = importlib.util.find_spec("triton")
    if torch.version.hip is not None or found is None or found.origin is None:
        return
    if not environment.keys() & {"CUDA_HOME", "CUDA_PATH"}:
        environment["CUDA_HOME"] = str(Path(found.origin).parent / "backends" / "nvidia")
        header = workspace / "include" / "nv" / "target"
        header.parent.mkdir(parents=True)
        header.write_text(NV_TARGET, encoding="ascii")
        _prepend(environment, "CPATH", workspace / "include")
    if (driver := _loaded(DRIVER)) is not None:  # drivers install libcuda.so.1, compilers look for libcuda.so
        folder = workspace / "lib"
        folder.mkdir(parents=True)
        (folder / DRIVER).symlink_to(driver)
        _prepend(environment, "LIBRARY_PATH", folder)


def _prepend(environment: MutableMapping[str, str], name: str, path: Path) -> None:
    environment[name] = os.pathsep.join(filter(None, [str(path), environment.get(name)]))


def _loaded(name: str, maps: Path = Path("/proc/self/maps")) -> Path | None:
    """Return the path of a shared library of this process whose name begins so; None if there is none."""
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.is_absolute() and path.name.startswith(name):
            return path
    return None
