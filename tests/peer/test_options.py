"""Links on the command line, as people paste them."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from p2ptrain.manifest import JoinLink
from peer.options import LINK

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
TEXT = f"p2ptrain://{'a' * 64}@/ip4/127.0.0.1/tcp/1/p2p/{PEER}"


@click.command()
@LINK
@click.option("--local", is_flag=True)
def command(link: str | None, local: bool) -> None:
    click.echo(f"{link and JoinLink.parse(link)} {local}")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ([], "None False"),
        ([TEXT, "--local"], f"{TEXT} True"),
        ([TEXT[:40], TEXT[40:90], TEXT[90:]], f"{TEXT} False"),
        (["p2ptrain", "peer", TEXT, "--local"], f"{TEXT} True"),
        ([f"p2ptrain peer '{TEXT}'"], f"{TEXT} False"),
    ],
)
def test_a_link_in_several_words(words: list[str], printed: str) -> None:
    done = CliRunner().invoke(command, words)
    assert (done.exit_code, done.output) == (0, f"{printed}\n")


def test_words_after_the_link_are_no_link() -> None:
    done = CliRunner().invoke(command, [TEXT, "here"])
    assert done.exit_code == 2
    assert "unexpected words after the link" in done.output


def test_options_within_the_text_are_not_lost() -> None:
    done = CliRunner().invoke(command, [f"p2ptrain peer '{TEXT}' --local"])
    assert done.exit_code == 2
    assert "Give --local after the link, outside of its quotes." in done.output
