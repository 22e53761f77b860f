"""``python -m bench.rivals``: make missing runs, then print the table. Root, Linux, an otherwise idle machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.environment import ROOT, environment
from bench.rivals.cases import RIVALS, SIZES, RivalCase, RivalRecord
from bench.rivals.readings import figures, notes_of
from bench.rivals.table import HEADINGS, lines, merged
from lab.cell import run_in_cell
from lab.hosts import check_network_support
from lab.namespaces import check_support
from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.manifest import create_run, sign_run

KNOWN = ROOT / "docs" / "results" / "rivals.json"
STOP_S = 240.0
"""Time for a run to end after it is asked to."""
HIVEMINDS, SOCKETS = Path("/tmp"), "hivemind-p2p*.sock"  # whatever TMPDIR says
"""Socket files of hivemind's processes, which a killed process leaves behind."""


@click.command()
@click.option("--rival", "rivals", multiple=True, type=click.Choice(RIVALS), help="Run only this; may be repeated.")
@click.option("--size", "sizes", multiple=True, type=click.Choice(sorted(SIZES)), help="Run only this size.")
@click.option("--peers", "counts", multiple=True, type=click.IntRange(2, 16), default=(4, 8), show_default=True)
@click.option("--seed", "seeds", multiple=True, type=click.IntRange(1), default=(1, 2, 3), show_default=True)
@click.option("--hurry", type=click.FloatRange(1.0), default=1.0, help="Divide all times by this, for a trial.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/rivals"), show_default=True)
@click.option(
    "--known",
    type=click.Path(dir_okay=False, path_type=Path),
    default=KNOWN,
    help="rivals.json of earlier runs, which are not repeated.  [default: docs/results/rivals.json]",
)
def main(
    rivals: tuple[str, ...],
    sizes: tuple[str, ...],
    counts: tuple[int, ...],
    seeds: tuple[int, ...],
    hurry: float,
    out: Path,
    known: Path,
) -> None:
    """Compare swarm, diloco and hivemind's averager on home lines. Four to nine minutes a run."""
    console = Console(highlight=False)
    try:
        check_support()
        check_network_support()
    except UserError as error:
        raise click.ClickException(str(error)) from None
    cases = [
        RivalCase(rival, size, peers, seed, hurry)
        for seed in seeds
        for size in sizes or tuple(SIZES)
        for peers in counts
        for rival in RIVALS
        if not rivals or rival in rivals
    ]
    earlier = json.loads(known.read_bytes())["runs"] if known.exists() else []
    for number, case in enumerate(cases, 1):
        folder = (out / case.name).absolute()
        if (folder / "figures.json").exists() or any(each["case"] == asdict(case) for each in earlier):
            continue
        console.print(f"[rivals] {number} of {len(cases)}: {case.name}", markup=False)
        run(case, folder)
    found = merged(earlier, [json.loads(path.read_bytes()) for path in sorted(out.glob("*/figures.json"))])
    files.replace(out / "rivals.json", json.dumps({"runs": found}, indent=1).encode())
    shown = Table(title="on home lines")
    for heading in HEADINGS:
        shown.add_column(heading)
    for line in lines(found):
        shown.add_row(*line)
    console.print(shown)


def sweep(sockets: Iterable[Path]) -> None:
    """Remove socket files without a listener."""
    for path in filter(Path.is_socket, sockets):
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                asking.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


def run(case: RivalCase, folder: Path) -> None:
    """Make one run in a fresh folder: always writes ``record.json``, and ``figures.json`` if the run succeeded."""
    shutil.rmtree(folder, ignore_errors=True)
    create_run(folder / "run", SIZES[case.size].preset, changes=case.manifest_changes())
    sign_run(folder / "run")
    command = [sys.executable, "-m", "bench.rivals.runner", str(folder), json.dumps(asdict(case))]
    before = set(HIVEMINDS.glob(SOCKETS))
    status = run_in_cell(command, STOP_S, PYTHONPATH=os.pathsep.join(sys.path[:1]), P2PTRAIN_COMPILE="off")
    sweep(set(HIVEMINDS.glob(SOCKETS)) - before)
    if status:
        raise click.ClickException(f"{case.name} ended with status {status}; see its output above.")
    record = RivalRecord.of(json.loads((folder / "record.json").read_bytes()))
    if record.troubles:
        click.echo(f"[rivals] {case.name}: {'; '.join(record.troubles)}", err=True)
        return
    homes = {who: folder / who for who in record.traffic}
    summaries = {
        who: json.loads((home / "summary.json").read_bytes())
        for who, home in homes.items()
        if (home / "summary.json").exists()
    }
    found = figures(record, {who: notes_of(home) for who, home in homes.items()}, summaries)
    files.replace(
        folder / "figures.json",
        json.dumps({"case": asdict(case), "environment": environment(), **found}, indent=1).encode(),
    )


if __name__ == "__main__":
    main()
