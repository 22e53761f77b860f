"""``make fuzz``: each target under atheris, which searches for inputs that reach new code.

A target is a process of its own, since libFuzzer ends its process. What it finds lies under OUT/<target>/; an input
that shows a fault belongs into tests/fuzz/found/<target>/, where the tests try it for ever after.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

RUNS = 100_000
"""For each target that takes microseconds; its divisor in ``fuzz_targets`` for the others."""
MOST_BYTES = 4_096
"""Longest input."""
SECONDS_AN_INPUT = 10
MOST_MEGABYTES = 4_096
"""Of the process, torch included: an input that makes it larger is a fault."""


@click.command()
@click.option("--runs", default=RUNS, show_default=True, type=click.IntRange(1), help="Inputs for each fast target.")
@click.option("--out", default=Path("out/fuzz"), show_default=True, type=click.Path(path_type=Path))
@click.option("--only", default="", help="Targets, with commas.")
@click.option("--target", hidden=True, default="")
def main(runs: int, out: Path, only: str, target: str) -> None:
    """Fuzz every decoder of what strangers send; write OUT/report.json, and exit with 1 when a fault was found."""
    if target:
        fuzz(target, runs, out)
        return

    from fuzz_targets import targets

    known = targets()
    names = [each for each in only.split(",") if each] or list(known)
    if unknown := set(names) - set(known):
        raise click.BadParameter(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    report = [searched(name, max(1, runs // known[name].runs), out) for name in names]
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(each["passed"] for each in report) else 1)


def searched(name: str, runs: int, out: Path) -> dict[str, Any]:
    """One target in a process of its own: an entry of the report."""
    began = time.monotonic()
    log = out / name / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, __file__, "--target", name, "--runs", str(runs), "--out", str(out)]
        passed = subprocess.run(command, check=False, stdout=file, stderr=subprocess.STDOUT).returncode == 0
    seconds = round(time.monotonic() - began, 1)
    click.echo(f"{name:18} {runs:8,} inputs {seconds:7.1f} s  {'ok' if passed else f'FAULT: see {log}'}")
    return {"target": name, "inputs": runs, "passed": passed, "seconds": seconds}


def fuzz(name: str, runs: int, out: Path) -> None:
    """One target, in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["p2ptrain"]):
        from fuzz_targets import targets

    target = targets()[name]
    folder = out / name / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (folder / f"seed-{number}").write_bytes(seed)
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
        target.check,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent / "admission")]  # what pytest is told in setup.cfg
    main()
