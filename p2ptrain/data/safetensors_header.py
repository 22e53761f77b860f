"""Headers of safetensors files from strangers (https://github.com/huggingface/safetensors, "Format").

A file is eight bytes with the header's length, the header as JSON, and the tensors' bytes without gaps. The header is
checked here before anything else is read. The library's own reader maps the file into memory, where a file that another
program shortens meanwhile ends the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from p2ptrain.base.errors import WeightsError
from p2ptrain.base.text import one_line

MAX_HEADER_BYTES = 4 << 20
"""Maximum of the header's length; 256 layers of 20 tensors, as large as a manifest allows, take 0.8 MB."""
MAX_TENSORS = 16_384
"""Maximum of tensors in a file: three times those of 256 layers."""
MAX_DIMENSIONS = 8

ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of an element of each type."""

PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of what ``torch.save`` writes: a zip archive, or a pickle."""

_WHOLE = "Get the whole file from where it was published, unchanged and unpacked."


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in its file."""

    dtype: str
    """Type as in ``ELEMENT_BYTES``."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(file: BinaryIO, size_bytes: int, path: Path) -> dict[str, TensorPlace]:
    """Read and check the header of an open file of ``size_bytes``; return the place of each tensor, by name.

    Raises:
        WeightsError: it is a pickle, no safetensors file, or its header does not describe its content exactly.
        OSError: it cannot be read.
    """
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise _other_format(start, path)
    if 8 + length > size_bytes:
        raise _cut_off(path, size_bytes, 8 + length)
    outline = _json(file.read(length), path)
    outline.pop("__metadata__", None)
    if len(outline) > MAX_TENSORS:
        raise _faulty(path, f"it has {len(outline):,} tensors, and at most {MAX_TENSORS:,} are read")
    found = {name: _place(entry, name, 8 + length, path) for name, entry in outline.items()}
    _check_gapless(list(found.values()), 8 + length, size_bytes, path)
    return found


def _json(data: bytes, path: Path) -> dict[str, Any]:
    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name is there twice")
        return found

    try:
        outline = json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _faulty(path, one_line(str(error), 80)) from None
    if not isinstance(outline, dict):
        raise _faulty(path, "it is not a table")
    return outline


def _place(entry: Any, name: str, offset: int, path: Path) -> TensorPlace:
    """Return the place that the header's entry describes, without comparing it with other entries."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if len(entry) == 3:
            numbers = [*shape, begin, end]
            is_sound = dtype in ELEMENT_BYTES and len(shape) <= MAX_DIMENSIONS
            is_sound = is_sound and all(type(each) is int and 0 <= each < 1 << 48 for each in numbers)
            if is_sound and end - begin == math.prod(shape) * ELEMENT_BYTES[dtype]:
                return TensorPlace(dtype, tuple(shape), offset + begin)
    raise _faulty(path, f"the entry of {one_line(name, 80)} is invalid")


def _check_gapless(places: Sequence[TensorPlace], begin: int, size_bytes: int, path: Path) -> None:
    """Raise WeightsError unless the tensors fill the rest of the file, each byte once."""
    for place in sorted(places, key=lambda each: (each.begin, each.elements)):
        if place.begin != begin:
            raise _faulty(path, "its tensors overlap, or leave gaps")
        begin += place.elements * ELEMENT_BYTES[place.dtype]
    if begin > size_bytes:
        raise _cut_off(path, size_bytes, begin)
    if begin < size_bytes:
        raise _faulty(path, f"{size_bytes - begin:,} bytes follow the last tensor")


def _other_format(start: bytes, path: Path) -> WeightsError:
    # Only if the first bytes are not a valid length: a valid one can be the first bytes of a pickle, too.
    if start.startswith(PICKLES):
        return WeightsError(
            f"{path} is a pickle, as torch.save writes it, which can run any program and is never loaded.",
            "Convert the model to safetensors where you trust it: load it with transformers and call save_pretrained.",
        )
    return WeightsError(f"{path} is not a safetensors file.", "Name the model's safetensors files, or their folder.")


def _cut_off(path: Path, size_bytes: int, wanted_bytes: int) -> WeightsError:
    return WeightsError(
        f"{path} is cut off: it has {size_bytes:,} bytes, and its header asks for {wanted_bytes:,}.", _WHOLE
    )


def _faulty(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} has a faulty safetensors header: {why}.", _WHOLE)
