"""What the compiler for cards finds, with doubles of a card, of Triton and of a process's libraries."""

from types import SimpleNamespace

import pytest
import torch

from p2ptrain.train import card_compiler
from p2ptrain.train.card_compiler import prepare

CARD = torch.device("cuda", 1)


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """Half of a card of 100 bytes is free; Triton is installed."""
    found = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 100))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *what: found.append(what))
    triton = SimpleNamespace(origin=str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(card_compiler.importlib.util, "find_spec", lambda name: triton)
    monkeypatch.setattr(card_compiler, "_loaded", lambda name: tmp_path / "libcuda.so.1")
    return found


def test_headers_of_triton_and_the_driver_in_use_are_enough(limits, tmp_path):
    environment = {"LIBRARY_PATH": "/usr/lib/mine"}
    prepare(CARD, tmp_path / "work", environment)
    assert environment == {
        "TRITON_CACHE_DIR": str(tmp_path / "work/triton"),
        "CUDA_HOME": str(tmp_path / "triton/backends/nvidia"),
        "CPATH": str(tmp_path / "work/include"),
        "LIBRARY_PATH": f"{tmp_path / 'work/lib'}:/usr/lib/mine",
    }
    assert (tmp_path / "work/lib/libcuda.so").readlink() == tmp_path / "libcuda.so.1"
    assert "NV_IF_ELSE_TARGET(condition, device, host) host" in (tmp_path / "work/include/nv/target").read_text()
    assert limits == [(pytest.approx(0.4), CARD)]  # four fifths of what is free


def test_a_toolkit_that_the_user_names_is_used(limits, tmp_path):
    environment = {"CUDA_HOME": "/opt/cuda"}
    prepare(CARD, tmp_path / "work", environment)
    assert (environment["CUDA_HOME"], "CPATH" in environment) == ("/opt/cuda", False)


def test_cards_of_amd_need_neither(limits, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    environment = {}
    prepare(CARD, tmp_path / "work", environment)
    assert environment == {"TRITON_CACHE_DIR": str(tmp_path / "work/triton")}


def test_a_library_of_this_process_is_found_by_the_beginning_of_its_name(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 fe:00 1    /usr/lib/libcudart.so.13\n7f02-7f03 rw-p 0 0:0 0\n")
    assert card_compiler._loaded("libcuda.so", maps) is None
    maps.write_text(maps.read_text() + "7f04-7f05 r-xp 0 fe:00 2    /usr/lib/libcuda.so.580.65.06\n")
    assert str(card_compiler._loaded("libcuda.so", maps)) == "/usr/lib/libcuda.so.580.65.06"
