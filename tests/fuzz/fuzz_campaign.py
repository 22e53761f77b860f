"""``make fuzz``: runs each target under atheris, which searches for inputs that reach new code.

A target is a process of its own, since libFuzzer ends its process. Findings are in OUT/<target>/; move an input
that shows a fault to tests/fuzz/found/<target>/, and the tests will always try it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

if TYPE_CHECKING:
    from fuzz_targets import Target

RUNS = 100_000
"""Runs of each target that takes microseconds; ``Target.runs`` is the divisor for slower ones."""
MOST_BYTES = 4_096
"""Longest input, in bytes."""
SECONDS_AN_INPUT = 10
MOST_MEGABYTES = 4_096
"""Memory limit of the process, torch included: an input that exceeds it is a fault."""


@click.command()
@click.option("--runs", default=RUNS, show_default=True, type=click.IntRange(1), help="Inputs for each fast target.")
@click.option("--out", default=Path("out/fuzz"), show_default=True, type=click.Path(path_type=Path))
@click.option("--only", default="", help="Targets, with commas.")
def main(runs: int, out: Path, only: str) -> None:
    """Fuzz every decoder of untrusted bytes, write OUT/report.json, and exit with 1 if a fault was found."""
    import atheris

    torch.set_num_threads(1)  # forked processes would lack the other threads
    with atheris.instrument_imports(include=["p2ptrain", "bootstrap"]):
        from fuzz_targets import targets

    known = targets()
    names = [each for each in only.split(",") if each] or list(known)
    if unknown := set(names) - set(known):
        raise click.BadParameter(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    report = [searched(name, known[name], max(1, runs // known[name].runs), out) for name in names]
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(each["passed"] for each in report) else 1)


def searched(name: str, target: Target, runs: int, out: Path) -> dict[str, Any]:
    """Fuzz one target in a forked process, and return an entry of the report.

    A fork, since importing and instrumenting everything again takes longer than some searches.
    """
    began = time.monotonic()
    log = out / name / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            fuzz(name, target, runs, out)
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # libFuzzer ends the process itself, so something else failed
    passed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    seconds = round(time.monotonic() - began, 1)
    click.echo(f"{name:22} {runs:8,} inputs {seconds:7.1f} s  {'ok' if passed else f'FAULT: see {log}'}")
    return {"target": name, "inputs": runs, "passed": passed, "seconds": seconds}


def fuzz(name: str, target: Target, runs: int, out: Path) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris

    folder = out / name / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (folder / f"seed-{number}").write_bytes(seed)

    def once(data: bytes) -> None:
        try:
            target.check(data)  # without a result, which libFuzzer would interpret
        except BaseException:  # libFuzzer writes the input in an exit handler, which a forked process never runs
            (out / name / f"fault-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
            raise

    longest = max(MOST_BYTES, *(2 * len(each) for each in target.seeds))
    atheris.Setup(
        [
            sys.argv[0],
            f"-runs={runs}",
            f"-max_len={longest}",
            f"-timeout={SECONDS_AN_INPUT}",
            f"-rss_limit_mb={MOST_MEGABYTES}",
            f"-artifact_prefix={out / name}/",
            "-seed=1",
            "-print_final_stats=1",
            str(folder),
        ],
        once,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent / "admission")]  # the paths that setup.cfg gives pytest
    main()
