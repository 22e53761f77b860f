"""Verification: results of other code are kept if today's code computes the same short runs.

A short run is a cell with five to ten outer steps: from warm-up over failures, arrivals and departures to the end in
some seconds. Cells that differ only in seed, budget or points of the curve share one. ``short_runs.json`` has the
headline of each, and the fingerprint of the code that computes it.

An entry of other code is kept if its short run is known from the same code and today's code repeats it. Then both get
today's fingerprint, and the entry the commit of the check; the kept headline stays, so that small differences do not
add up from check to check. Otherwise it says which code does not repeat it (``lost``), and the pages show it until
it is computed anew. A short run does not see what begins later in a run.

Coarse modular codecs magnify rounding, which differs between processors. Where the same code gives another headline on
another processor, that one stands in ``elsewhere``, by hand, with the processor and the commit that computed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.evidence.cells import TUNING_SEED, Cell, Choice
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.fingerprint import fingerprint
from bench.evidence.run import Document, digest, forget_builds, load, measured, write
from bench.evidence.scenario import scenario, tokens_per_step
from bench.evidence.tuning import choice_of

SHORT_RUNS = "short_runs"
"""Name of the file with the short runs."""

LEAST_OUTER_STEPS, MOST_OUTER_STEPS = 5, 10
"""Outer steps of a short run, mean over peers. Guards that compare with earlier steps begin at eight."""

SHORT_TOKENS = 102_400
"""Tokens of all peers that make more than the least outer steps: ten of them in the central setting."""

POINTS = 2
"""Points of the curve of a short run."""

CURVE_SEQUENCES = 16
"""Held-out sequences of each point."""

TOLERANCE = 2e-3
"""Relative difference of figures up to which two short runs are equal. Measured with N = 8: one machine repeats all
digits, also with AVX2 in place of AVX-512; initial weights changed by 1e-6, more than rounding differs between
processors, move losses by 6e-5 in fp32, 4e-4 in modular4 and 1.5e-3 with speeds of 1 and 20, and disagreements by up
to 1.5e-3."""

TIME_TOLERANCE = 0.05
"""Relative difference of ``seconds_to`` a loss, which divides that of the loss by the slope of a curve with few points;
2e-2 was measured in the same way."""

Group = list[tuple[Cell, dict[str, Any]]]
"""Cells with the same short run, and their entries."""


def shortened(cell: Cell, choice: Choice) -> dict[str, Any]:
    """Return the scenario of a cell's short run."""
    together = cell.setting.inner_steps * tokens_per_step(cell.setting) * cell.setting.peers
    outer_steps = min(max(SHORT_TOKENS // together, LEAST_OUTER_STEPS), MOST_OUTER_STEPS)
    setting = replace(cell.setting, tokens=outer_steps * together, points=POINTS)
    made = scenario(replace(cell, setting=setting, seed=TUNING_SEED, shorter=1), choice)
    made["learner"]["curve_sequences"] = CURVE_SEQUENCES
    return made


def simulated_briefly(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``headline`` reads of a report; a swarm is evaluated on the curve's sequences alone.

    Evaluating every peer on the whole split, as a report does, takes longer than the training.
    """
    # Imported here, so that a command that simulates nothing does not load torch.
    import torch

    from sim.observer import figures
    from sim.scenario import Scenario
    from sim.simulate import begin
    from sim.simulation import Simulation

    torch.set_num_threads(1)
    simulation = begin(Scenario.model_validate(wanted))
    simulation.run()
    if not isinstance(simulation, Simulation):
        return simulation.report("").model_dump(mode="json")
    simulation.observer.look()
    now, parameters = simulation.world.now, simulation.scenario.learner.parameters
    return {
        "simulated_s": now,
        "overall": figures(simulation.population.members, parameters, now).model_dump(mode="json"),
        "groups": {},
        "curve": [point.model_dump(mode="json") for point in simulation.observer.points],
    }


def agree(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Return whether two headlines have the same figures, up to rounding on other processors."""
    return one.keys() == other.keys() and all(
        math.isclose(one[name], other[name], rel_tol=TIME_TOLERANCE if "seconds_to" in name else TOLERANCE)
        for name in one
    )


def verify(
    folder: Path,
    pool: Executor,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    simulate: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> list[Cell]:
    """Make the missing short runs and repeat those of other code; keep the entries whose short run is as before.

    Args:
        environment: ``commit``, ``date`` and ``machine``, kept with the results.
        say: takes a line of progress.
        simulate: scenario -> report; called in the pool.

    Returns:
        Cells whose entries are not kept: today's code computes another short run, or theirs is unknown.
    """
    today, build = fingerprint(), {"date": environment["date"], "machine": environment["machine"]}
    documents = {name: load(folder, name) for name, each in EXPERIMENTS.items() if each.cells}
    groups, wanted = _groups(documents)
    runs = load(folder, SHORT_RUNS)
    known: dict[str, dict[str, Any]] = {each["scenario"]: each for each in runs["cells"] if each["scenario"] in groups}
    unclear = [key for key, group in groups.items() if _is_unclear(group, known.get(key), today)]
    futures = {pool.submit(measured, simulate, wanted[key]): key for key in unclear}
    for number, future in enumerate(as_completed(futures), start=1):
        result, key = future.result(), futures[future]
        before, group = known.get(key), groups[key]
        same = before is not None and _repeats(before, result["headline"])
        if before is not None and same:
            for cell, entry in group:
                if entry["code"] == before["code"]:
                    entry |= {"code": today, "verified": environment["commit"]}
                    entry.pop("lost", None)
                    documents[cell.experiment]["builds"][environment["commit"]] = build
            before["code"] = today
        elif "failure" not in result and any(entry["code"] == today for _, entry in group):
            known[key] = {"scenario": key, "code": today, **result, "commit": environment["commit"]}
            runs["builds"][environment["commit"]] = build
        say(f"{number}/{len(unclear)} {group[0][0].name}: {_outcome(before, result, same)}")
    lost = [(cell, entry) for group in groups.values() for cell, entry in group if entry["code"] != today]
    unmarked = [(cell, entry) for cell, entry in lost if entry.get("lost", {}).get("code") != today]
    for cell, entry in unmarked:
        entry["lost"] = {"code": today, "commit": environment["commit"]}
        documents[cell.experiment]["builds"][environment["commit"]] = build
    if unclear or unmarked:
        runs["cells"] = [known[key] for key in groups if key in known]
        for document in (runs, *documents.values()):
            if document["cells"]:
                forget_builds(document)
                write(folder, document)
    return [cell for cell, _ in lost]


def _repeats(before: Mapping[str, Any], headline: Mapping[str, float]) -> bool:
    """Return whether a short run is as before, on the processor of its results or on another one that is known."""
    known = [before["headline"], *(each["headline"] for each in before.get("elsewhere", ()))]
    return any(agree(each, headline) for each in known)


def _groups(documents: Mapping[str, Document]) -> tuple[dict[str, Group], dict[str, dict[str, Any]]]:
    """Return planned cells that have an entry, and the scenarios of their short runs, both by digest of the latter."""
    groups: dict[str, Group] = {}
    wanted: dict[str, dict[str, Any]] = {}
    for name, document in documents.items():
        entries = {(each["contender"], each["scenario"]): each for each in document["cells"] if "failure" not in each}
        for cell in EXPERIMENTS[name].cells if entries else ():
            choice = choice_of(cell, documents["tuning"]["cells"])
            if choice is None:
                continue
            if entry := entries.get((cell.contender.name, digest(scenario(cell, choice)))):
                short = shortened(cell, choice)
                wanted[digest(short)] = short
                groups.setdefault(digest(short), []).append((cell, entry))
    return groups, wanted


def _is_unclear(group: Group, known: Mapping[str, Any] | None, today: str) -> bool:
    """Return whether running the short run again can keep an entry, now or after the next change of code."""
    code = known["code"] if known else ""
    return code != today and any(entry["code"] in (code, today) for _, entry in group)


def _outcome(before: Mapping[str, Any] | None, result: Mapping[str, Any], same: bool) -> str:
    if "failure" in result:
        return f"FAILED: {result['failure']}"
    if before is None:
        return "noted"
    if same:
        return "as before"
    was, now = before["headline"], result["headline"]
    changed = [name for name in {**was, **now} if not agree(_only(name, was), _only(name, now))]
    return "CHANGED: " + ", ".join(f"{name} {was.get(name, '-')} to {now.get(name, '-')}" for name in changed)


def _only(name: str, headline: Mapping[str, float]) -> dict[str, float]:
    return {name: headline[name]} if name in headline else {}
