"""Models in Hugging Face format, from anybody: weights in safetensors, a tokenizer.json, and no code that is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from p2ptrain.base import files
from p2ptrain.base.errors import DeviceError, UserError
from p2ptrain.base.imports import large_imports
from p2ptrain.base.text import one_line
from p2ptrain.data.published_settings import PublishedSettings
from p2ptrain.data.tokenizer import JsonTokenizer, read_tokenizer
from peer.options import CONFIG_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILE = "tokenizer.json"
INDEX_FILE = "model.safetensors.index.json"

MOST_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors header (the library's own limit)."""

FULL_BYTES = 4
"""Bytes of a parameter in fp32, in which a folder's weights are loaded; pages of its files can be dropped."""


def load_folder(folder: Path) -> PreTrainedModel:
    """Load a folder's causal language model: fp32, on the CPU, ready for evaluation.

    Raises UserError if the weights are not safetensors, are incomplete, do not fit in memory, or need code of their
    own.
    """
    check_fits(_parameters(folder), FULL_BYTES)
    with large_imports():
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

    logging.disable_progress_bar()
    with _explained(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
        module: PreTrainedModel = loaded[0]
        found: dict[str, Any] = loaded[1]
    missing = sorted({*found["missing_keys"], *(str(each) for each in found["mismatched_keys"])})
    if missing:
        raise UserError(
            f"The weights in {folder} do not fit its {CONFIG_FILE}: {one_line(', '.join(map(str, missing)), 120)} "
            "missing or of another shape.",
            "Get the whole folder of one model.",
        )
    module.train(False)
    return module


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn errors of transformers, which raises nothing specific, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(
            f"The library transformers cannot load {folder}: {one_line(str(error) or type(error).__name__)}.",
            "Get the whole folder of a causal language model that transformers knows without code of its own.",
        ) from error


def folder_tokenizer(folder: Path) -> tuple[JsonTokenizer, list[int]]:
    """Return a folder's tokenizer, with the ids with which it begins every text, and those at which a text ends.

    Documents end as the model's configuration says, or as the tokenizer's vocabulary suggests. Raises UserError if
    there is no usable tokenizer.json.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} has no {TOKENIZER_FILE}.",
            "Write one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    tokenizer = read_tokenizer(path)
    ends = PublishedSettings.read(folder).ends_for(tokenizer)
    return (read_tokenizer(path, ends[0]) if ends and ends[0] != tokenizer.separator else tokenizer), ends


def check_fits(parameters: int, bytes_each: int) -> None:
    """Raise DeviceError unless so many parameters fit into this machine's free memory."""
    needed, free = parameters * bytes_each, psutil.virtual_memory().available
    if needed > free:
        raise DeviceError(
            f"The model has {parameters:,} parameters, which take {needed / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free.",
            "End other programs, or use a machine with more memory.",
        )


def _parameters(folder: Path) -> int:
    """Return the number of weights that a folder's safetensors files announce. Raises UserError."""
    return sum(_announced(path) for path in weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder's model. Raises UserError if there is none or one is missing."""
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    try:
        index = json.loads((folder / INDEX_FILE).read_bytes())
        names = sorted({str(name) for name in index["weight_map"].values()})
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no weights in safetensors format.",
            "Convert them with transformers, in an environment that trusts them: save_pretrained writes safetensors.",
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX_FILE} is damaged.", "Get the whole folder again.") from error
    paths = [folder / name for name in names]
    for name, path in zip(names, paths, strict=True):
        if Path(name).name != name or not path.is_file():
            raise UserError(f"{folder} lacks {one_line(name)}, which {INDEX_FILE} names.", "Get the whole folder.")
    return paths


def _announced(path: Path) -> int:
    """Return the number of weights in the header of a safetensors file: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= MOST_HEADER_BYTES:
                raise ValueError("no header")
            header: dict[str, Any] = json.loads(file.read(length))
        return sum(_product(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = files.cause(error) if isinstance(error, OSError) else "it is not a whole safetensors file"
        raise UserError(f"{path} cannot be read: {why}.", "Get the whole folder again.") from error


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= int(size)
    return product
