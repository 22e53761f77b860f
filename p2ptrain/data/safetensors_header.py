"""Where the tensors lie in safetensors files from strangers (https://github.com/huggingface/safetensors, "Format").

A file is eight bytes with the header's length, the header as JSON, and the tensors' bytes without gaps. The library
checks all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.base.errors import WeightsError
from p2ptrain.base.text import one_line

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


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Read and check the header of a file; return the place of each tensor, by name.

    Raises:
        WeightsError: it is a pickle, no safetensors file, or its header does not describe its content exactly.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        start = file.read(8)
    found: dict[str, TensorPlace] = {}
    begin = len(start) + int.from_bytes(start, "little")
    try:
        with safe_open(path, "numpy") as opened:
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                place = TensorPlace(part.get_dtype(), tuple(part.get_shape()), begin)
                found[name] = place
                begin += place.elements * ELEMENT_BYTES[place.dtype]
    except KeyError as error:
        raise _unusable(start, path, f"it has tensors of the type {error.args[0]}") from None
    except SafetensorError as error:
        raise _unusable(start, path, one_line(str(error), 160)) from None
    return found


def _unusable(start: bytes, path: Path, why: str) -> WeightsError:
    # Only of a file that is none of safetensors: the first bytes of one may be those of a pickle, too.
    if start.startswith(PICKLES):
        return WeightsError(
            f"{path} is a pickle, as torch.save writes it, which can run any program and is never loaded.",
            "Convert the model to safetensors where you trust it: load it with transformers and call save_pretrained.",
        )
    return WeightsError(
        f"{path} is not a whole safetensors file: {why}.",
        "Name the model's safetensors files, or their folder; if they are those, get them again where they were "
        "published.",
    )
