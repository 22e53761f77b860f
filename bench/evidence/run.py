"""From the plan to the documents: start cells while there is room and time, keep each result at once, publish.

A run that is stopped, in whatever way, loses the cells under way and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.evidence import documents, figures
from bench.evidence.cells import Cell, Choice
from bench.evidence.grid import document as tuning_document
from bench.evidence.headline import headline
from bench.evidence.layout import Experiment
from bench.evidence.plan import Job, Results, State, core_seconds, hours, jobs, pace, tuned
from bench.evidence.pool import Outcome
from bench.evidence.scenario import scenario
from bench.evidence.store import Record, Store
from bench.evidence.summary import document as summary_document
from bench.evidence.summary import summaries


class Workers(Protocol):
    """``pool.Pool``, or ``fake.InlinePool``."""

    @property
    def has_room(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    def start(self, key: int, scenario: Mapping[str, Any]) -> None: ...

    def next(self) -> Outcome: ...


@dataclass(slots=True)
class Campaign:
    """One call of ``python -m bench.evidence``.

    Args:
        cells: everything that is wanted.
        store: where results lie and go.
        published: tuning that was published before; used for methods whose tuning is not among the cells.
        code: digest of the sources that decide the numbers.
        environment: machine, commit and date, for the records.
        refresh_stale: whether results of older code are made again.
        say: takes one line for people.
    """

    cells: Sequence[Cell]
    store: Store
    published: Results
    code: str
    environment: Mapping[str, str]
    say: Callable[[str], None]
    refresh_stale: bool = False
    clock: Callable[[], float] = time.monotonic
    given_up: set[str] = field(default_factory=set)
    """Names of cells that failed, or whose worker died: not tried again in this call."""

    def results(self) -> Results:
        """What the tuning found; published results only for methods that are not being tuned here."""
        own = {cell.contender.name for cell in self.cells if cell.experiment == "tuning"}
        before = {name: grid for name, grid in self.published.items() if name not in own}
        return {**before, **tuned(self.cells, self.store)}

    def jobs(self) -> list[Job]:
        """The state of everything."""
        return jobs(self.cells, self.store, self.results(), self.code)

    def wanted(self, job: Job) -> bool:
        """Whether it is to be run."""
        stale = self.refresh_stale and job.state is State.STALE
        return (stale or job.state in (State.TO_DO, State.FAILED)) and job.cell.name not in self.given_up

    def run(self, pool: Workers, workers: int, budget_s: float) -> None:
        """Run what is wanted until nothing is left or no cell may be started any more."""
        began = self.clock()
        under_way: dict[int, Job] = {}
        names: set[str] = set()
        serial = 0
        while True:
            if self.clock() - began < budget_s:
                for job in self._ready(names):
                    if not pool.has_room:
                        break
                    assert job.scenario is not None
                    serial += 1
                    under_way[serial] = job
                    names.add(job.cell.name)
                    pool.start(serial, job.scenario)
            if not pool.is_busy:
                return
            outcome = pool.next()
            job = under_way.pop(outcome.key)
            names.discard(job.cell.name)
            self._take(job, outcome, workers)

    def _ready(self, under_way: set[str]) -> Iterator[Job]:
        return (job for job in self.jobs() if self.wanted(job) and job.cell.name not in under_way)

    def _take(self, job: Job, outcome: Outcome, workers: int) -> None:
        if outcome.lost:
            self.given_up.add(job.cell.name)
            self.say(f"{job.cell.name}: {outcome.failure}; left out of this run")
            return
        assert job.scenario is not None
        record = Record(
            name=job.cell.name,
            scenario=job.scenario,
            headline={} if outcome.report is None else headline(outcome.report),
            failure=outcome.failure,
            code=self.code,
            commit=self.environment["commit"],
            machine=self.environment["machine"],
            date=self.environment["date"],
            seconds=outcome.seconds,
        )
        self.store.keep(record)
        if record.failure is not None:
            self.given_up.add(job.cell.name)
        self.say(self._line(job, record, workers))

    def _line(self, job: Job, record: Record, workers: int) -> str:
        all_jobs = self.jobs()
        left = [each.cell for each in all_jobs if self.wanted(each) or each.state is State.WAITING]
        done = len(all_jobs) - len(left)
        loss = "" if record.loss is None else f"loss {record.loss:.4f}, "
        result = f"FAILED: {record.failure}" if record.failure else f"{loss}{record.seconds:.0f} s"
        ahead = hours(left, workers, measured_pace(all_jobs))
        return f"{done}/{len(all_jobs)} {job.cell.name}: {result}; about {ahead:.1f} h left"


def measured_pace(all_jobs: Iterable[Job]) -> float:
    """How real seconds compare with expected ones, over everything that is done."""
    records = ((job.cell, job.record) for job in all_jobs)
    return pace((cell, each.seconds) for cell, each in records if each and each.seconds and not each.failure)


def publish(
    experiments: Mapping[str, Experiment],
    campaign: Campaign,
    folder: Path,
    names: Iterable[str],
) -> None:
    """Write the documents of these experiments, the tuning's, the summary and the drawings into the folder."""
    results = campaign.results()
    if own := tuned(campaign.cells, campaign.store):
        before = documents.read(folder / "tuning.json") or {"contenders": {}}
        made = tuning_document(own, *_origins(campaign))
        made["builds"] = {**before.get("builds", {}), **made["builds"]}
        made["contenders"] = {**before["contenders"], **made["contenders"]}
        documents.write(folder / "tuning.json", made)
    for name in names:
        path = folder / f"{name}.json"
        fresh = documents.document(
            experiments[name], campaign.store, results, documents.read(path), campaign.environment
        )
        if fresh["cells"] and not _same_numbers(fresh, documents.read(path)):
            documents.write(path, fresh)
    there = {name: each for name in experiments if (each := documents.read(folder / f"{name}.json")) is not None}
    found = {name: summaries(experiments[name], each["cells"]) for name, each in there.items()}
    tuning = documents.read(folder / "tuning.json")
    documents.write(folder / "summary.json", summary_document(found, experiments, tuning))
    try:
        for name, rows in found.items():
            figures.draw(experiments[name], rows, folder / "figures" / f"{name}.svg")
    except ImportError:
        campaign.say("matplotlib is not installed: drawings stay as they are; pip install matplotlib makes them")


def _origins(campaign: Campaign) -> tuple[dict[tuple[str, Choice], documents.Origin], documents.Builds]:
    """Where the numbers of the tuning come from: of each choice of each contender, and the builds behind them."""
    origins: dict[tuple[str, Choice], documents.Origin] = {}
    builds: documents.Builds = {}
    for cell in campaign.cells:
        if cell.experiment != "tuning" or cell.choice is None:
            continue
        if (record := campaign.store.find(scenario(cell, cell.choice))) is not None:
            origins[cell.contender.name, cell.choice] = documents.origin(record)
            builds[record.code] = documents.later(builds.get(record.code), record)
    return origins, builds


def _same_numbers(made: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    """Whether only the date or commit of a computed document would change."""
    if before is None or made.get("planned"):
        return False
    bare = ("builds",)
    return {k: v for k, v in made.items() if k not in bare} == {k: v for k, v in before.items() if k not in bare}


def expected(cells: Iterable[Cell]) -> dict[str, tuple[int, float]]:
    """Cells and core hours of each experiment, each scenario counted where it comes first."""
    found: dict[str, tuple[int, float]] = {}
    for cell in cells:
        count, before = found.get(cell.experiment, (0, 0.0))
        found[cell.experiment] = (count + 1, before + core_seconds(cell) / 3_600)
    return found
