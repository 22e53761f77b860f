"""Files of tensors: written in pieces from any device, read in parts, and what their errors mean."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

PIECE_ELEMENTS = 1 << 22
"""Elements that a device copies to the host at once for writing: 16 MB in fp32, which no transfer notices."""

_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}


def write_tensors(path: Path, tensors: Mapping[str, Saved]) -> str:
    """Write a safetensors file (https://github.com/huggingface/safetensors, "Format"); return its digest.

    The library would need every tensor whole and on the host at once, which doubles the memory of a peer with a card.
    """
    shapes = {name: _shape(saved) for name, saved in tensors.items()}
    kinds = {name: parts(saved)[0].dtype for name, saved in tensors.items()}
    contents = {name: _bytes_of(saved) for name, saved in tensors.items()}
    return write_streamed(path, shapes, kinds, contents)


def write_streamed(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    kinds: Mapping[str, torch.dtype],
    contents: Mapping[str, Iterator[memoryview]],  # consumed in the order of the file
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file whose tensors are produced in pieces; return its digest. Raises OSError."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    names, end = sorted(shapes, key=lambda name: (-kinds[name].itemsize, name)), 0
    for name in names:
        begin = end
        end += math.prod(shapes[name]) * kinds[name].itemsize
        header[name] = {"dtype": _TYPES[kinds[name]], "shape": list(shapes[name]), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = blake3()
    with path.open("wb") as file:
        for data in (len(text).to_bytes(8, "little"), text):
            file.write(data)
            digest.update(data)
        for name in names:
            for piece in contents[name]:
                file.write(piece)
                digest.update(piece)
    return digest.hexdigest()


def parts(saved: Saved) -> Sequence[Tensor]:
    """Return a saved tensor's parts, at least one."""
    return (saved,) if isinstance(saved, Tensor) else saved


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor on any device, in pieces on the host."""
    for piece in tensor.detach().reshape(-1).split(PIECE_ELEMENTS):
        yield memoryview(piece.cpu().view(torch.uint8).numpy())


def _bytes_of(saved: Saved) -> Iterator[memoryview]:
    for part in parts(saved):
        yield from pieces_of(part)


def _shape(saved: Saved) -> list[int]:
    if isinstance(saved, Tensor):
        return list(saved.shape)
    return [sum(piece.numel() for piece in saved)]


def file_digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint, each read when it is asked for, so that they are never all in memory at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = safe_open(path, framework="pt")
        self._names = tuple(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with _explained(self._path):
            whole: Tensor = self._file.get_tensor(name)
        return whole

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return elements of a flat vector, [end - begin]. Raises KeyError and HomeError."""
        if end > self.length(name):
            raise KeyError(name)
        with _explained(self._path):
            found: Tensor = self._file.get_slice(name)[begin:end]
        return found

    def length(self, name: str) -> int:
        """Return the elements of a tensor. Raises KeyError."""
        if name not in self._names:
            raise KeyError(name)
        return math.prod(self._file.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert errors of reading a file in this block to a HomeError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise HomeError(f"{path} cannot be read: {plainly(error)}.", files.remedy(system_error(error), "")) from error


def plainly(error: Exception) -> str:
    """Describe for people why something could not be read or written."""
    if isinstance(error, KeyError | TypeError):
        return f"its state file is damaged ({error})"
    cause = system_error(error)
    return "the disk is full" if cause.errno == errno.ENOSPC else cause.strerror or str(error)


def system_error(error: Exception) -> OSError:
    """Return the error of the operating system that an error of safetensors (Rust) tells as text."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\bos error (\d+)\b", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))
