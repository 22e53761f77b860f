"""Published results as records of a store, so that a fresh clone goes on where the last computer stopped.

A published entry names its scenario's digest and the code that made it, which is what a record is found by. It holds
the figures that its experiments show, not the whole headline; where two experiments share a scenario, those of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.evidence import documents
from bench.evidence.grid import DIVERGED
from bench.evidence.identity import scenario_digest
from bench.evidence.plan import Job
from bench.evidence.run import Campaign
from bench.evidence.store import Record

Found = dict[str, dict[str, Any]]
"""Fields of a record, by the digest of its scenario."""


def adopt(campaign: Campaign, folder: Path) -> int:
    """Keep a record of every wanted cell that the documents in the folder have and the store has not; how many."""
    found = published(folder)
    # Twice: which scenario a cell of an experiment wants is known once its method's tuning is there.
    return sum(_keep(campaign, job, found) for _ in range(2) for job in campaign.jobs())


def published(folder: Path) -> Found:
    """What the documents in a folder hold. Entries without a known build are left out."""
    found: Found = {}
    for path in sorted(folder.glob("*.json")):
        document = documents.read(path) or {}
        builds = document.get("builds", {})
        for entry in _entries(document):
            build = builds.get(entry.get("code")) or {}
            if "scenario" not in entry or not {"commit", "date", "machine"} <= set(build):
                continue
            same = found.get(entry["scenario"], {"headline": {}})
            if same.get("code", entry["code"]) != entry["code"]:
                continue
            found[entry["scenario"]] = {
                "headline": {**same["headline"], **entry["headline"]},
                "failure": entry.get("failure"),
                "code": entry["code"],
                "confirmed": tuple(entry.get("confirmed", ())),
                "seconds": entry.get("seconds", 0.0),
                **{name: build[name] for name in ("commit", "date", "machine")},
            }
    return found


def _entries(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from document.get("cells", ())
    for contender in document.get("contenders", {}).values():
        for point in contender["grid"]:
            yield {**point, "headline": DIVERGED if point["loss"] is None else {"loss": point["loss"]}}


def _keep(campaign: Campaign, job: Job, found: Found) -> bool:
    if job.scenario is None or job.record is not None:
        return False
    fields = found.get(scenario_digest(job.scenario))
    if fields is None:
        return False
    campaign.store.keep(Record(name=job.cell.name, scenario=job.scenario, **fields))
    return True
