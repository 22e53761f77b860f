"""Programs of the system that are missing, fail, hang or print odd things."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.base import system_tool
from p2ptrain.base.system_tool import ToolError, output_of


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "tool is not installed"),
        ("#!/bin/sh\necho\necho no luck\necho again\nexit 3\n", "tool: no luck"),
        ("#!/bin/sh\nexit 3\n", "tool: exit status 3"),
        ("#!/bin/sh\nexec sleep 60\n", "tool did not answer within 0.1 s"),
        ("#!/nowhere/sh\n", "tool cannot be started: No such file or directory"),
    ],
)
def test_a_program_that_fails_says_why(
    tools: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    monkeypatch.setattr(system_tool, "DEADLINE_S", 0.1)
    if script is not None:
        write(tools, "tool", script)
    with pytest.raises(ToolError) as caught:
        output_of("tool")
    assert str(caught.value) == said


def test_long_and_odd_output_is_one_printable_line(tools: Path) -> None:
    write(tools, "tool", "#!/bin/sh\nprintf '\\033[2J%0999d\\377' 0\nexit 1\n")
    with pytest.raises(ToolError) as caught:
        output_of("tool")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= system_tool.MOST_CHARS
