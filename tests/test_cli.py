"""The command line: commands, errors and exit statuses."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import p2ptrain
from p2ptrain.base.cgroups import CgroupLimits
from p2ptrain.cli import (
    LAZY_COMMANDS,
    LazyCommand,
    cli,
    prepare_fallbacks,
    prepare_threads,
    run_command,
)
from p2ptrain.manifest import PRESETS, load_run


def run(command: click.Command, *arguments: str) -> int:
    """Run the program through its error boundary, and return the exit status."""
    with pytest.raises(SystemExit) as caught:
        run_command(command, list(arguments), name="p2ptrain")
    return caught.value.code


def test_the_commands_are_frozen() -> None:
    """Check all options of init and sign against a list, since no option may change the algorithm."""
    assert list(cli.commands) == ["init", "sign", "docs", *LAZY_COMMANDS]
    assert list(LAZY_COMMANDS) == [
        "tokens",
        "bootstrap",
        "peer",
        "rank",
        "status",
        "pause",
        "resume",
        "finish",
        "identity",
        "service",
        "invite",
        "admit",
        "revoke",
        "contributions",
        "export",
        "generate",
        "evaluate",
        "chat",
        "publish",
        "publish-tokens",
        "doctor",
        "simulate",
        "testnet",
    ]
    own = {name: command for name, command in cli.commands.items() if name not in LAZY_COMMANDS}
    assert {name: [parameter.name for parameter in command.params] for name, command in own.items()} == {
        "init": [
            "run",
            "preset",
            "corpora",
            "tokenizer",
            "model",
            "text_field",
            "template",
            "sequence_length",
            "held_out",
            "is_all",
            "name",
        ],
        "sign": ["run"],
        "docs": [],
    }


def test_help_lists_every_command_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "--help") == 0
    listing = capsys.readouterr().out
    for name, lazy in LAZY_COMMANDS.items():
        assert name in listing
        assert lazy.help[:30] in listing


@pytest.mark.parametrize(
    ("words", "offered"),
    [("p2ptrain fi", "finish"), ("p2ptrain peer --nick", "--nickname"), ("p2ptrain init --pre", "--preset")],
)
def test_the_shell_completes_commands_and_options(
    words: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_P2PTRAIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as caught:
        run_command(cli, [], name="p2ptrain")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"plain,{offered}\n"


def test_help_of_init_names_all_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "init", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in PRESETS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "--version") == 0
    assert p2ptrain.__version__ in capsys.readouterr().out


def test_init_then_sign(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    init = CliRunner().invoke(cli, ["init", directory])
    assert init.exit_code == 0
    assert f"p2ptrain sign {directory}" in init.output
    sign = CliRunner().invoke(cli, ["sign", directory])
    assert sign.exit_code == 0
    signed = load_run(tmp_path / "run")
    assert signed.manifest.run.name == "run"
    assert signed.run_id in sign.output
    assert "Unchanged since it was signed" in CliRunner().invoke(cli, ["sign", directory]).output
    path = tmp_path / "run" / "manifest.toml"
    path.write_text(path.read_text().replace("seed = 1", "seed = 2"))
    assert "This is a new run" in CliRunner().invoke(cli, ["sign", directory]).output


def test_a_user_error_prints_problem_and_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "init", str(tmp_path), "--preset", "dem") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: There is no preset 'dem'.\n  Did you mean demo? Choose one of demo, llama-15m, llama-135m.\n"
    )


def test_a_typo_in_the_manifest_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "init", str(tmp_path)) == 0
    path = tmp_path / "manifest.toml"
    path.write_text(path.read_text().replace("weight_decay", "wieght_decay"))
    assert run(cli, "sign", str(tmp_path)) == 2
    assert "did you mean training.weight_decay?" in capsys.readouterr().err


def test_unknown_commands_and_options_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, right in ("initt", "init"), ("boostrap", "bootstrap"), ("piers", "peer"):
        assert run(cli, wrong) == 2
        said = capsys.readouterr().err
        assert "Did you mean" in said
        assert f"'{right}'" in said
    assert run(cli, "init", "--learning-rate", "1") == 2
    assert run(cli, "init") == 2
    assert "Usage" in capsys.readouterr().err


@pytest.mark.parametrize(("result", "status"), [(None, 0), (0, 0), (3, 3), ("text", 0)])
def test_an_integer_result_is_the_exit_status(result: object, status: int) -> None:
    assert run(click.Command("stub", callback=lambda: result)) == status


def test_ctrl_c_exits_130() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run(click.Command("stub", callback=interrupted)) == 130


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("place", "status", "said"),
    [
        (
            "full",
            2,
            "error: The output cannot be written: No space left on device.\n"
            "  Free some space on that disk, or redirect the output to another place.\n",
        ),
        ("pipe", 141, ""),
    ],
)
def test_a_full_disk_is_an_error_and_a_closed_pipe_ends_quietly(
    unbuffered: str, place: str, status: int, said: str
) -> None:
    """Check also data that Python buffers and writes at its end."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "p2ptrain.cli", "--version"]
    with Path("/dev/full").open("wb") as full, os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            command,
            stdout={"full": full, "pipe": pipe}[place],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert (done.returncode, done.stderr) == (status, said)


WORDS_OF_OTHERS = r"""
import click, sys
from rich.console import Console
from p2ptrain.base.errors import UserError
from p2ptrain.base.telemetry import lossy_output
from p2ptrain.cli import run_command

def said():
    click.echo("name \u738b\u2026")
    Console().print("rich \u738b", soft_wrap=True)
    with lossy_output():
        print("peer \u738b")
    print("log \u738b", file=sys.stderr)
    raise UserError("no \u738b", "move \u738b")

run_command(click.Command("stub", callback=said))
"""


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252:strict", "ascii:strict"])
def test_what_the_terminal_lacks_is_replaced(encoding: str) -> None:
    ours = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", WORDS_OF_OTHERS], capture_output=True, env=ours, check=False)
    assert done.returncode == 2, done.stderr.decode()
    lines = done.stdout.split(b"\n")
    assert (lines[0].startswith(b"name "), lines[1:]) == (True, [b"rich ?", b"peer ?", b""])
    if encoding != "ascii:strict":  # where click writes UTF-8
        assert lines[0] == (b"name ??" if encoding == "latin-1" else b"name ?\x85")
        assert done.stderr == b"log ?\nerror: no ?\n  move ?\n"
    shown = subprocess.run(
        [sys.executable, "-m", "p2ptrain.cli", "peer", "--help"], capture_output=True, env=ours, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, b"")


def test_without_output_nothing_is_replaced() -> None:
    command = [sys.executable, "-c", WORDS_OF_OTHERS]
    assert subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], check=False).returncode == 2


def test_a_fault_of_our_own_keeps_its_traceback() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(click.Command("stub", callback=broken), [])


def test_a_quota_limits_the_threads_of_what_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("p2ptrain.base.cgroups.limits", lambda root: CgroupLimits(math.inf, 1.5, math.inf))
    monkeypatch.setattr("os.environ", {})
    seen = click.Command("stub", callback=lambda: seen_values.append(os.environ.get("OMP_NUM_THREADS")))
    seen_values: list[str | None] = []
    assert run(seen) == 0
    assert seen_values == ["1"]


def test_a_lazy_command_is_imported_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    module = types.ModuleType("a_lazy_module")
    module.command = click.Command("later", callback=lambda: called.append(True))
    module.nonsense = 5
    monkeypatch.setitem(sys.modules, "a_lazy_module", module)
    monkeypatch.setitem(LAZY_COMMANDS, "later", LazyCommand("a_lazy_module", "command", "help"))
    monkeypatch.setitem(LAZY_COMMANDS, "wrong", LazyCommand("a_lazy_module", "nonsense", "help"))
    assert run(cli, "later") == 0
    assert called == [True]
    with pytest.raises(TypeError, match="is not a click command"):
        run_command(cli, ["wrong"])


def test_the_platform_is_checked_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as caught:
        run_command(cli, ["--help"])
    assert caught.value.code == 2
    assert "this is win32" in capsys.readouterr().err


BAD_ARGUMENTS = (
    "export nowhere out",
    "generate nowhere Once",
    "evaluate nowhere",
    "evaluate nowhere nowhere",
    "chat nowhere",
    "publish nowhere me/model --license mit",
    "bootstrap nowhere",
    "bootstrap . --weights nowhere",
    "bootstrap . --listen nowhere",
    "peer --home nowhere",
    "peer --home nowhere --weights nowhere",
    "simulate nowhere.toml",
    "tokens nowhere",
    "publish-tokens nowhere out",
    "contributions nowhere",
    "service install nowhere",
    "init run --corpus nowhere",
)


def test_arguments_are_checked_before_torch_is_imported(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["torch"] = None  # importing it fails
from click import BadParameter
from p2ptrain.base.errors import UserError
from p2ptrain.cli import cli
for arguments in {BAD_ARGUMENTS}:
    try:
        cli.main(arguments.split(), standalone_mode=False)
    except (UserError, BadParameter) as error:
        assert "nowhere" in str(error), error
    else:
        raise AssertionError(arguments)
"""
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [*tmp_path.iterdir()] == []


def test_torchs_threads_wait_without_spinning_for_long() -> None:
    script = "import os; from p2ptrain.cli import prepare_threads; prepare_threads(os.environ); import torch"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"  # OpenMP prints its settings when it is loaded
    shown = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT = '1000'" in shown.stderr


def test_the_owners_wait_policy_is_kept() -> None:
    environment = {"OMP_WAIT_POLICY": "ACTIVE"}
    prepare_threads(environment)
    assert "GOMP_SPINCOUNT" not in environment


def test_what_a_backend_lacks_is_computed_on_the_cpu_unless_the_owner_says_otherwise() -> None:
    environment = {"PYTORCH_ENABLE_MPS_FALLBACK": "0"}
    prepare_fallbacks(environment)
    assert environment == {"PYTORCH_ENABLE_MPS_FALLBACK": "0", "PYTORCH_ENABLE_XPU_FALLBACK": "1"}
