"""Options of earlier starts: what a home remembers, and what takes precedence."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.start_options import START_FILE, OptionsFile, merged, names
from peer import app
from peer.cli import peer
from peer.home import Home
from peer.start_options import StartOptions

NAMES = names(StartOptions)
EVERYTHING = StartOptions(
    device="cpu",
    stages=2,
    team=2,
    at="192.168.1.5:7007",
    nickname="Ada's",
    weights=Path("/data/my model"),
    mirror="hf:someone/text",
    text_gb=2.5,
    listen=("/ip4/0.0.0.0/tcp/31337",),
    announce=("/ip4/203.0.113.7/tcp/31337", "/dns4/example.org/tcp/31337"),
    local=True,
    relay=False,
    page="0.0.0.0:8080",
    page_token="secret",
    page_hosts="a.example,b.example",
    share=True,
    track="tensorboard:/data/runs",
    keep="0-3",
)


def test_every_option_is_remembered_in_a_file_that_only_the_owner_can_read(tmp_path: Path) -> None:
    file = OptionsFile(tmp_path, StartOptions)
    assert file.load() == StartOptions()
    file.save(EVERYTHING)
    assert file.load() == EVERYTHING
    assert all(getattr(EVERYTHING, name) is not None for name in NAMES)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.save(StartOptions())
    assert file.load() == StartOptions()


def test_the_options_are_shown_as_words_to_paste_without_the_token() -> None:
    words = EVERYTHING.words()
    assert "secret" not in " ".join(words)
    assert words[words.index("--weights") + 1] == "/data/my model"
    assert words.count("--announce") == 2
    assert {"--local", "--no-relay", "--share"} <= set(words)
    assert StartOptions().words() == []


def test_given_options_take_precedence_and_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = StartOptions(relay=True, local=False, weights=Path("model"), page_token="newer")
    both = merged(given, EVERYTHING)
    assert (both.relay, both.local, both.page, both.page_token) == (True, False, "0.0.0.0:8080", "newer")
    assert both.weights == tmp_path / "model"
    assert both.announce == EVERYTHING.announce


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        "\x00",
        '{"options": 3}',
        '{"options": {"relya": true}}',
        '{"options": {"relay": "yes"}}',
        '{"options": {"listen": "/ip4"}}',
        json.dumps({"options": {"nickname": "x" * 33}}),
        json.dumps({"options": {"device": "tpu"}}),
    ],
)
def test_a_faulty_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / START_FILE).write_text(text)
    with pytest.raises(HomeError) as caught:
        OptionsFile(tmp_path, StartOptions).load()
    assert str(tmp_path / START_FILE) in caught.value.problem
    assert "\n" not in caught.value.problem
    assert "give the options again" in caught.value.remedy


def test_a_file_that_is_not_text_or_not_readable_is_named(tmp_path: Path) -> None:
    (tmp_path / START_FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(HomeError, match="faulty"):
        OptionsFile(tmp_path, StartOptions).load()
    (tmp_path / START_FILE).unlink()
    (tmp_path / START_FILE).mkdir()
    with pytest.raises(HomeError, match="cannot be read"):
        OptionsFile(tmp_path, StartOptions).load()


def test_every_option_of_the_command_is_remembered_or_known_not_to_be() -> None:
    options = {parameter.name for parameter in peer.params}
    assert options - set(NAMES) == {"link", "home", "forget", "verbose", "devices"}  # remembered as device
    assert {field.name for field in fields(StartOptions)} <= options


def test_a_peer_started_with_its_home_alone_has_the_options_of_its_first_start(
    tmp_path: Path, signed_run: Callable[..., SignedManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "my home")
    home.path.mkdir()
    home.save_manifest(signed_run())
    seen: list[Any] = []
    monkeypatch.setattr(app, "build", lambda options, *rest: seen.append(options) or _stop())

    def start(*words: str) -> str:
        result = CliRunner().invoke(peer, ["--home", str(home.path), *words])
        assert isinstance(result.exception, UserError), result.output
        return result.output

    first = start("--nickname", "Ada's", "--local", "--device", "cpu", "--page", "0", "--page-token", "secret")
    assert "options of earlier starts" not in first
    again = start()
    assert """--local --page 0 --device cpu --nickname 'Ada'"'"'s' (--forget""" in again
    assert "secret" not in again
    start("--no-local", "--nickname", "Bob")
    start("--forget", "--device", "cpu")
    start()
    assert [each.nickname for each in seen] == ["Ada's", "Ada's", "Bob", None, None]
    assert [each.local for each in seen] == [True, True, False, None, None]
    assert [each.page_token for each in seen] == ["secret", "secret", "secret", None, None]


def _stop() -> None:
    raise UserError("enough", "Stop.")
