"""The code version that a result names."""

import subprocess
from pathlib import Path

import pytest

from bench import environment as module


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for name in ("code.py", "docs/RESULTS.md", "docs/results/R1.json"):
        (tmp_path / name).write_text("before\n", encoding="utf-8")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "one")):
        git = ("git", "-c", "user.name=somebody", "-c", "user.email=somebody@localhost", "-c", "commit.gpgsign=false")
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def test_a_changed_file_is_told_but_not_what_measuring_writes(checkout: Path) -> None:
    clean = module.environment()["commit"]
    assert len(clean) == 12
    assert module.commit_of(checkout / "docs") == clean, "from a folder of the checkout, too"
    (checkout / "docs" / "RESULTS.md").write_text("after\n", encoding="utf-8")
    (checkout / "docs" / "results" / "R1.json").unlink()
    assert module.environment()["commit"] == clean
    (checkout / "code.py").write_text("after\n", encoding="utf-8")
    assert module.environment()["commit"] == module.commit_of(checkout / "docs") == f"{clean}-dirty"


def test_without_git_the_commit_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert module.environment()["commit"] == "unknown"
