"""Two ``init`` in one directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.data.unfinished import Unfinished


def test_the_second_one_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    first = Unfinished(tmp_path / "run", "the text")
    first.save({"at": 3})
    with pytest.raises(HomeError, match="Another p2ptrain init"):
        Unfinished(tmp_path / "run", "another text")
    assert first.load() is not None
    first.close()
    other = Unfinished(tmp_path / "run", "another text")
    assert other.load() is None
    other.close()


def test_a_failed_init_deletes_nothing_where_a_run_came_to_be(tmp_path: Path) -> None:
    late = Unfinished(tmp_path / "run", "the text")
    (tmp_path / "run/shards").mkdir()
    (tmp_path / "run/manifest.toml").write_text("of another one")
    late.forget(is_all=True)
    late.close()
    assert {each.name for each in (tmp_path / "run").iterdir()} == {"shards", "manifest.toml"}
