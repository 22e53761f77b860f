"""The folder of compiled libraries: private, free of what nobody uses, and with nothing half-written or tried twice."""

import os

import pytest

from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.libraries import failure, is_whole, private_folder, publish, remember_failure


def test_a_library_that_others_could_write_is_not_run(tmp_path):
    folder = private_folder(tmp_path / "compiled", "torch-1")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(CompiledPassError, match="other users can write to"):
        private_folder(tmp_path / "compiled", "torch-1")


def test_what_was_not_used_for_long_is_deleted(tmp_path):
    folder = private_folder(tmp_path, "torch-1")
    old, new = folder / "old.so", folder / "new.so"
    for each in (old, new):
        each.touch()
    os.utime(old, (0, 0))
    os.utime(folder, (0, 0))
    assert private_folder(tmp_path, "torch-2").exists()
    assert not folder.exists()
    folder = private_folder(tmp_path, "torch-1")
    for each in (old, new):
        each.touch()
    os.utime(old, (0, 0))
    private_folder(tmp_path, "torch-1")
    assert [each.name for each in folder.iterdir()] == ["new.so"]


def test_a_library_is_whole_only_as_it_was_published(tmp_path):
    made, library = tmp_path / "made.so", tmp_path / "pass.so"
    assert not is_whole(library)
    made.write_bytes(b"library")
    publish(made, library)
    assert is_whole(library)
    assert not made.exists()
    library.write_bytes(b"lib")
    assert not is_whole(library)


def test_a_failure_is_remembered_beside_the_library(tmp_path):
    library = tmp_path / "pass.so"
    assert failure(library) == ""
    remember_failure(library, "CppCompileError: no such option (or so)")
    assert failure(library) == "CppCompileError: no such option (or so)"
    assert [each.name for each in tmp_path.iterdir()] == ["pass.failed"]
