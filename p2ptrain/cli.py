"""Command line ``p2ptrain`` and its error boundary.

Commands that train or use the network live in ``peer`` and ``bootstrap`` and are imported when they are called, so
``p2ptrain --help`` answers at once and an unsupported platform is reported before any heavy import fails.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

import p2ptrain
from p2ptrain.base import cgroups
from p2ptrain.base.documents import documents
from p2ptrain.base.errors import ClosedPipeError, UserError
from p2ptrain.base.imports import command_imports, package_of_clone
from p2ptrain.base.options import FiniteRange
from p2ptrain.base.telemetry import replace_what_lacks, strict_output
from p2ptrain.base.text import UserPath, command_line, first_sentence, printable

if TYPE_CHECKING:
    from p2ptrain.data.given_model import GivenModel
    from p2ptrain.manifest import Manifest

CPU_FALLBACKS = ("PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_ENABLE_XPU_FALLBACK")
"""Variables of torch for operations that a card's backend lacks. torch reads them when it is imported."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells expect.
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE: the status in a shell of cat or git in the same case.


FILE = click.Path(path_type=UserPath)


@dataclass(frozen=True)
class LazyCommand:
    """Command that another package provides."""

    module: str
    attribute: str
    help: str
    """Line in ``p2ptrain --help``, shown without importing the module."""
    is_of_clone: bool = False
    """Whether only a clone of the repository has the module."""


LAZY_COMMANDS = {
    "tokens": LazyCommand("p2ptrain.data.command", "tokens", "Count the tokens of a run's text, or show some."),
    "bootstrap": LazyCommand("bootstrap.cli", "bootstrap", "Run a swarm's entry point and print its join link."),
    "peer": LazyCommand("peer.cli", "peer", "Join a run by its link and train."),
    "rank": LazyCommand(
        "peer.training.rank_command", "rank", "Lend this computer to a peer on the same private network."
    ),
    "status": LazyCommand("peer.owner.commands", "status", "Show what the peer in a home is doing."),
    "pause": LazyCommand("peer.owner.commands", "pause", "Pause the peer in a home."),
    "resume": LazyCommand("peer.owner.commands", "resume", "Resume a paused peer."),
    "finish": LazyCommand("peer.owner.commands", "finish", "Make the peer in a home finish its step, save and leave."),
    "identity": LazyCommand("peer.identity_command", "identity", "Show a peer's id, or give a copied home its own."),
    "service": LazyCommand("peer.service", "service", "Start a peer at each login and after a crash."),
    "invite": LazyCommand("peer.cli", "invite", "Print a join link, or invite peers to your run."),
    "admit": LazyCommand("peer.cli", "admit", "Admit peers to your run."),
    "revoke": LazyCommand("peer.cli", "revoke", "Ban peers from your run, or revoke an invite."),
    "contributions": LazyCommand("peer.cli", "contributions", "Show a peer's contributions, signed by its partners."),
    "export": LazyCommand("peer.cli", "export", "Write a peer's model in Hugging Face format."),
    "generate": LazyCommand("peer.cli", "generate", "Continue a text with a model."),
    "evaluate": LazyCommand("peer.trained.evaluate_command", "evaluate", "Measure a model's loss on a text."),
    "chat": LazyCommand("peer.trained.chat_command", "chat", "Talk with a model."),
    "publish": LazyCommand(
        "peer.trained.publish_command", "publish", "Publish a peer's model on the Hugging Face hub."
    ),
    "publish-tokens": LazyCommand("peer.trained.publish_tokens", "publish_tokens", "Make a mirror of a run's text."),
    "doctor": LazyCommand("peer.doctor", "doctor", "Diagnose this machine and its network."),
    "simulate": LazyCommand("sim.command", "simulate", "Simulate a swarm from a scenario file; in a clone.", True),
    "testnet": LazyCommand(
        "peer.testnet", "testnet", "Run a whole swarm on this machine and compare it with one peer."
    ),
}


class LazyGroup(click.Group):
    """Group whose lazy commands are imported when they are called, not when they are listed."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY_COMMANDS:
            return super().get_command(ctx, cmd_name)
        lazy = LAZY_COMMANDS[cmd_name]
        if lazy.is_of_clone:
            try:
                package_of_clone(lazy.module.split(".")[0], f"p2ptrain {cmd_name}")
            except UserError:
                if ctx.resilient_parsing:  # a shell completes a command
                    return None
                raise
        command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{lazy.module}.{lazy.attribute} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=100)) for name, each in self.commands.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(p2ptrain.__version__, prog_name="p2ptrain")
def cli() -> None:
    """Many strangers' computers pre-train one language model together.

    Start a run with init, sign and bootstrap; join one with peer; try it all on one machine with testnet.
    """


@cli.command(short_help="Create a run: write its manifest and signing key.")
@click.argument("run", type=click.Path(file_okay=False, path_type=UserPath))
@click.option(
    "--preset", help="Template: demo, llama-15m or llama-135m.  [demo; with --corpus: the size that fits the text]"
)
@click.option(
    "--corpus",
    "corpora",
    multiple=True,
    metavar="PATH|hf:OWNER/NAME",
    help="Your text: a file or folder of text, jsonl or parquet, or a data set, as hf:OWNER/NAME[:CONFIG]; repeatable.",
)
@click.option(
    "--tokenizer",
    metavar="PATH|hf:OWNER/NAME",
    help="Your tokenizer.json, or a model's; without it tokens are bytes.",
)
@click.option(
    "--model", metavar="PATH|hf:OWNER/NAME", help="Continue this published model; without it weights are random."
)
@click.option(
    "--text-field", default="", help="Column of a jsonl or parquet corpus.  [messages if it has dialogues, else text]"
)
@click.option(
    "--template",
    type=FILE,
    metavar="FILE|chatml",
    help="Chat template of dialogues, in Jinja.  [the model's, else chatml]",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(8, 1 << 17),
    help="Tokens of a sequence.  [the preset's; of dialogues what most need]",
)
@click.option(
    "--held-out",
    type=FiniteRange(0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="Share of the text that is held out, at most 4 MiB of tokens.",
)
@click.option("--all", "is_all", is_flag=True, help="Take all of the text, also what the run's budget does not need.")
@click.option("--name", help="Name of the run for people.  [RUN's, if it has only letters, digits and . _ -]")
def init(
    run: Path,
    preset: str | None,
    corpora: tuple[str, ...],
    tokenizer: str | None,
    model: str | None,
    text_field: str,
    template: Path | None,
    sequence_length: int | None,
    held_out: float,
    is_all: bool,
    name: str | None,
) -> None:
    """Write a commented manifest and the run's signing key into the directory RUN.

    With --corpus, tokenize the text once, choose a model size for it, and store tokens and tokenizer in RUN; a stopped
    init goes on where it was. With --model, take sizes, tokenizer and initial weights from a folder of safetensors
    files or from the Hugging Face hub.
    """
    from p2ptrain.data.command import create_with_text
    from p2ptrain.manifest import KEY_FILE, MANIFEST_FILE, check_free

    check_free(run)
    if not corpora and text_field:
        raise UserError(f"--text-field {text_field} needs the text that has this field.", "Name it with --corpus.")
    if not corpora and template is not None:
        raise UserError(f"--template {template} needs dialogues.", "Name them with --corpus.")
    if not corpora and is_all:
        raise UserError("--all needs the text that it takes as a whole.", "Name it with --corpus.")
    size = create_with_text(
        run,
        corpora=corpora,
        tokenizer=tokenizer,
        preset=preset,
        column=text_field,
        run_name=name,
        model=None if model is None else given_model(model),
        template=template,
        sequence_length=sequence_length,
        held_out=held_out,
        is_all=is_all,
    )
    click.echo(f"{run / MANIFEST_FILE}: {size}; edit it freely.")
    click.echo(f"{run / KEY_FILE}: the signing key of this run; keep it secret and keep a copy.")
    click.echo(f"Next: {command_line('p2ptrain', 'sign', run)}")


def given_model(where: str) -> GivenModel:
    """Read the model that an author names; imports torch. Raises UserError."""
    with command_imports():
        from p2ptrain.train.existing_model import read_model

    return read_model(where)


def check_kept_weights(run: Path, manifest: Manifest) -> None:
    """Check the weights that a run keeps against its model, whose sizes may have been edited; imports torch.

    Raises UserError.
    """
    from p2ptrain.data.file_store import named_weights, stored

    paths = [stored(run, file.sha256) for file in named_weights(manifest)]
    kept = [path for path in paths if path is not None]
    if kept and len(kept) == len(paths):
        with command_imports():
            from p2ptrain.train.initial_weights import check_weights
        check_weights(manifest.model, kept)


@cli.command(short_help="Sign and freeze a run's manifest.")
@click.argument("run", type=click.Path(file_okay=False, path_type=UserPath))
def sign(run: Path) -> None:
    """Sign the manifest in the directory RUN. Its digest becomes the id of the run."""
    with command_imports():
        from p2ptrain.data.checking import check_run
        from p2ptrain.data.command import progress_bar
    from p2ptrain.manifest import advice, read_run, sign_run

    manifest = read_run(run)
    for warning in advice(manifest):
        click.echo(printable(f"warning: {warning}."), err=True)
    with progress_bar("reading the shards") as show:
        warnings = check_run(manifest, run, lambda share: show("reading the shards", share))
    for warning in warnings:
        click.echo(printable(f"warning: {first_sentence(warning)}."), err=True)
    if warnings:
        click.echo(f"More about the text: {command_line('p2ptrain', 'tokens', run)}", err=True)
    check_kept_weights(run, manifest)
    signing = sign_run(run)
    match signing.previous:
        case None:
            click.echo(f"Signed: run {signing.signed.run_id}")
        case signing.signed.run_id:
            click.echo(f"Unchanged since it was signed: run {signing.signed.run_id}")
        case _:
            click.echo(f"Signed: run {signing.signed.run_id}")
            click.echo(f"This is a new run; peers of run {signing.previous} continue with the old one.")
    click.echo(f"Next: {command_line('p2ptrain', 'bootstrap', run)}")


@cli.command(short_help="Print where the documents are.")
def docs() -> None:
    """Print the directory that has README.md and docs/, of which messages and documents speak."""
    folder = documents()
    if folder is None:
        raise UserError("This installation has no documents.", "Reinstall p2ptrain from its wheel, or use a clone.")
    click.echo(folder)


for _name, _lazy in LAZY_COMMANDS.items():  # for the list of commands, and for click's "Did you mean"
    cli.add_command(click.Command(_name, short_help=_lazy.help))


def prepare_threads(environment: MutableMapping[str, str]) -> None:
    """Set what the libraries' threads read when they are loaded, unless the owner has set it.

    GNU OpenMP's threads spin 300,000 times while they wait for each other, and beside other programs for the rest of
    their time slices. Measured with two threads on two cores, demo's model: 1,399 instead of 211 tokens/s beside eight
    programs; alone 10,994 instead of 13,294, and as many as before with llama-15m's model.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")
    cgroups.limit_threads(environment)


def prepare_fallbacks(environment: MutableMapping[str, str]) -> None:
    """Let torch compute on the CPU what a card's backend lacks, unless the owner has decided otherwise."""
    for name in CPU_FALLBACKS:
        environment.setdefault(name, "1")


def run_command(command: click.Command, arguments: list[str] | None = None, name: str | None = None) -> NoReturn:
    """Run a click command as a process: the error boundary of every entry point.

    An integer that the command returns becomes the exit status. A UserError, including a failed write to standard
    output, prints its problem and remedy and exits with 2; a closed pipe prints nothing and exits with 141; Ctrl+C
    exits with 130; a bug keeps its traceback. The output may have characters that the terminal lacks.
    """
    replace_what_lacks()
    try:
        if sys.platform not in ("linux", "darwin"):
            problem = f"p2ptrain runs on Linux and macOS, and this is {sys.platform}."
            raise UserError(problem, "Run it in WSL 2 on Windows.")
        prepare_threads(os.environ)  # before torch is imported
        prepare_fallbacks(os.environ)
        with strict_output():
            result = command.main(arguments, prog_name=name, standalone_mode=False)
    except ClosedPipeError:
        sys.exit(EXIT_CLOSED_PIPE)
    except UserError as error:
        with suppress(OSError):  # standard error is closed too
            click.echo(f"error: {error.problem}\n  {error.remedy}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(result if isinstance(result, int) else 0)


def main() -> NoReturn:
    run_command(cli, name="p2ptrain")


if __name__ == "__main__":
    main()
