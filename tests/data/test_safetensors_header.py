"""Headers of safetensors files from strangers: what is read, and what is refused before anything else is read."""

from __future__ import annotations

import contextlib
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from p2ptrain.base.errors import WeightsError
from p2ptrain.data.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, TensorPlace, read_header


def packed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def read(path: Path, content: bytes) -> dict[str, TensorPlace]:
    path.write_bytes(content)
    with path.open("rb") as file:
        return read_header(file, len(content), path)


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 4),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "c": torch.zeros(0),
        "d": torch.ones(()),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    content = path.read_bytes()
    found = read(path, content)
    assert {name: place.shape for name, place in found.items()} == {"a": (3, 4), "b": (5,), "c": (0,), "d": ()}
    begin = found["b"].begin
    assert found["b"].dtype == "BF16"
    assert content[begin : begin + 10] == b"\x80?" * 5


HOSTILE = {
    "empty": (b"", "is not a safetensors file"),
    "short": (b"abc", "is not a safetensors file"),
    "text": (b"This is a text and no model.", "is not a safetensors file"),
    "huge header": (packed({}, length=MAX_HEADER_BYTES + 1), "is not a safetensors file"),
    "endless header": (packed({}, length=2**64 - 1), "is not a safetensors file"),
    "header beyond the end": (packed({}, length=100), "is cut off: it has 10 bytes"),
    "no JSON": (packed(b"{no JSON"), "faulty safetensors header"),
    "no UTF-8": (packed(b"\xff\xfe{}"), "faulty safetensors header"),
    "no table": (packed([1]), "it is not a table"),
    "deep": (packed(b"[" * 100_000), "faulty safetensors header"),
    "a number of thousands of digits": (packed(b'{"a": ' + b"1" * 5000 + b"}"), "faulty safetensors header"),
    "a name twice": (packed(b'{"a": 1, "a": 1}'), "a name is there twice"),
    "too many": (packed({str(n): 1 for n in range(MAX_TENSORS + 1)}), "at most 16,384"),
    "no entry": (packed({"a": 3}), "the entry of a is invalid"),
    "a field more": (packed({"a": {**entry(), "x": 1}}, bytes(8)), "the entry of a is invalid"),
    "negative offset": (packed({"a": entry(-8, 0)}, bytes(8)), "the entry of a is invalid"),
    "reversed offsets": (packed({"a": entry(8, 0)}, bytes(8)), "the entry of a is invalid"),
    "offsets beyond all disks": (packed({"a": entry(0, 2**60, [2**58])}), "the entry of a is invalid"),
    "a fraction": (packed({"a": entry(0.0, 8)}, bytes(8)), "the entry of a is invalid"),
    "a truth value": (packed({"a": entry(False, 8)}, bytes(8)), "the entry of a is invalid"),
    "negative shape": (packed({"a": entry(shape=[-2])}, bytes(8)), "the entry of a is invalid"),
    "a shape that overflows": (packed({"a": entry(shape=[2**32, 2**32])}, bytes(8)), "the entry of a is invalid"),
    "too many dimensions": (packed({"a": entry(shape=[1] * 9)}, bytes(8)), "the entry of a is invalid"),
    "unknown type": (packed({"a": entry(dtype="OBJECT")}, bytes(8)), "the entry of a is invalid"),
    "wrong size": (packed({"a": entry(shape=[3])}, bytes(8)), "the entry of a is invalid"),
    "overlap": (packed({"a": entry(), "b": entry(4, 12)}, bytes(12)), "overlap, or leave gaps"),
    "the same place": (packed({"a": entry(), "b": entry()}, bytes(8)), "overlap, or leave gaps"),
    "a gap": (packed({"a": entry(), "b": entry(12, 20)}, bytes(20)), "overlap, or leave gaps"),
    "a gap at the start": (packed({"a": entry(4, 12)}, bytes(12)), "overlap, or leave gaps"),
    "cut off": (packed({"a": entry()}, bytes(7)), "is cut off"),
    "more than the tensors": (packed({"a": entry()}, bytes(9)), "1 bytes follow the last tensor"),
    "a name that moves the cursor": (packed({"\x1b[2J": 3}), "the entry of \N{REPLACEMENT CHARACTER}[2J is invalid"),
}


@pytest.mark.parametrize(("content", "said"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(WeightsError) as caught:
        read(tmp_path / "model.safetensors", content)
    assert said in caught.value.problem
    assert caught.value.problem.isprintable()


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580, 0x4B50])
def test_a_sound_header_may_be_as_long_as_the_first_bytes_of_a_pickle_say(tmp_path: Path, length: int) -> None:
    header = json.dumps({"a": entry()}).encode()
    content = packed(header.ljust(length), b"\0" * 8)
    assert content[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")
    assert read(tmp_path / "model.safetensors", content)["a"].shape == (2,)


class Surprise:
    """Object whose unpickling would fail the test."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return exec, ("raise SystemExit('a pickle was loaded')",)


@pytest.mark.parametrize("form", ["zip", "legacy", "plain", "empty zip"])
def test_a_pickle_under_the_name_of_safetensors_is_never_loaded(tmp_path: Path, form: str) -> None:
    path = tmp_path / "model.safetensors"
    if form == "plain":
        path.write_bytes(pickle.dumps(Surprise()))
    elif form == "empty zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Surprise()))
    else:
        torch.save({"a": torch.zeros(2), "b": Surprise()}, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(WeightsError, match=r"is a pickle, .* never loaded") as caught:
        read(path, path.read_bytes())
    assert "save_pretrained" in caught.value.remedy


@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for each in (content, length.to_bytes(8, "little") + content):
        with contextlib.suppress(WeightsError):
            read(path, each)
