"""Two ``init`` in one directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.data.unfinished import Unfinished


def test_the_second_one_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    first = Unfinished(tmp_path / "run", {"--corpus": "the text"})
    first.save({"at": 3})
    with pytest.raises(HomeError, match="Another p2ptrain init"):
        Unfinished(tmp_path / "run", {"--corpus": "another text"})
    first.close()
    with pytest.raises(HomeError, match="differs in --corpus"):
        Unfinished(tmp_path / "run", {"--corpus": "another text"})
    again = Unfinished(tmp_path / "run", {"--corpus": "the text"})
    assert again.load() is not None
    again.close()


def test_a_failed_init_deletes_nothing_where_a_run_came_to_be(tmp_path: Path) -> None:
    late = Unfinished(tmp_path / "run", {})
    (tmp_path / "run/shards").mkdir()
    (tmp_path / "run/manifest.toml").write_text("of another one")
    late.forget(is_all=True)
    late.close()
    assert {each.name for each in (tmp_path / "run").iterdir()} == {"shards", "manifest.toml"}
