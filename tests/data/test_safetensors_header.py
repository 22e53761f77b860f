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
from p2ptrain.data.safetensors_header import TensorPlace, read_header


def packed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def read(path: Path, content: bytes) -> dict[str, TensorPlace]:
    path.write_bytes(content)
    return read_header(path)


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
    "empty": b"",
    "short": b"abc",
    "text": b"This is a text and no model.",
    "endless header": packed({}, length=2**64 - 1),
    "header beyond the end": packed({}, length=100),
    "no JSON": packed(b"{no JSON"),
    "no table": packed([1]),
    "deep": packed(b"[" * 100_000),
    "no entry": packed({"a": 3}),
    "reversed offsets": packed({"a": entry(8, 0)}, bytes(8)),
    "a shape that overflows": packed({"a": entry(shape=[2**32, 2**32])}, bytes(8)),
    "unknown type": packed({"a": entry(dtype="OBJECT")}, bytes(8)),
    "a type of half a byte": packed({"a": entry(0, 1, dtype="F4")}, bytes(1)),
    "overlap": packed({"a": entry(), "b": entry(4, 12)}, bytes(12)),
    "a gap": packed({"a": entry(), "b": entry(12, 20)}, bytes(20)),
    "cut off": packed({"a": entry()}, bytes(7)),
    "more than the tensors": packed({"a": entry()}, bytes(9)),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(WeightsError, match="is not a whole safetensors file") as caught:
        read(tmp_path / "model.safetensors", content)
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
