"""Scenario as a run of real peers: its manifest, and what a stage does not support."""

from __future__ import annotations

from typing import Any

from lab.scenario import DISK_BREAKAGES, NETWORK_EVENTS, RealGroup, RealScenario
from lab.script import Script
from lab.stages import StageName, own_latency
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.recipes import RECIPES
from sim.errors import ScenarioError
from sim.scenario_file import by_name

MOST_PEERS = 64
"""Limit of peers, at half a gigabyte each; as in a testnet without a scenario."""


def check(scenario: RealScenario, script: Script, stage: StageName, netem: bool = True) -> None:
    """Raise ScenarioError with a line for everything that real peers, or this stage, do not support.

    Args:
        netem: whether links of containers can have delay and loss (``containers.has_netem``).
    """
    faults = [*_learner_faults(scenario), *_crowd_faults(scenario, script)]
    for place, group in enumerate(scenario.peers):
        faults += [f"peers[{place}].{fault}" for fault in _group_faults(group, stage, netem)]
    if stage != "namespaces" and scenario.bootstrap.up_mbit_s is not None:
        faults.append(f"bootstrap.up_mbit_s: stage {stage} does not shape its line; take --stage namespaces")
    if stage != "namespaces" and scenario.partitions:
        has = "has one loopback for all peers" if stage == "local" else "has one network for all peers"
        faults.append(f"partitions: stage {stage} {has}; take --stage namespaces")
    if faults:
        lines = by_name(faults, [group.name for group in scenario.peers])
        raise ScenarioError("\n".join(lines), "Change these fields; docs/LABORATORY.md lists what a testnet supports.")


def _learner_faults(scenario: RealScenario) -> list[str]:
    faults, learner = [], scenario.learner
    if learner.kind != "lm":
        faults.append(f"learner.kind: real peers train a language model, not {learner.kind}; take lm")
    elif learner.data != "iid":
        faults.append(f"learner.data: real peers all read the whole corpus, not {learner.data}; take iid")
    if scenario.run.failed_exchanges:
        faults.append(
            "run.failed_exchanges: real exchanges cannot be made to fail; take peers.packet_loss or partitions"
        )
    if scenario.run.split != "validation":
        faults.append(f"run.split: real peers have one held-out split, not {scenario.run.split}; take validation")
    if scenario.pace.policy != "fixed":
        faults.append(
            f"pace.policy: real peers do fixed numbers of inner steps, not {scenario.pace.policy}; take fixed"
        )
    if not RECIPES[scenario.outer.recipe].exchanges:
        faults.append(f"outer.recipe: {scenario.outer.recipe} exchanges nothing, so there is nothing to test")
    elif scenario.needs_everybody:
        faults.append(
            f"outer.recipe: {scenario.outer.recipe} averages over all peers, which only p2ptrain simulate can"
        )
    return faults


def _crowd_faults(scenario: RealScenario, script: Script) -> list[str]:
    faults = []
    if len(script.hosts) > MOST_PEERS:  # peers on one host run one after the other
        faults.append(f"peers: {len(script.hosts)} in total; a testnet supports at most {MOST_PEERS}")
    if not script.first:
        faults.append("peers: no peer starts at second 0; give a group arrives_at_s = 0")
    return faults


def _group_faults(group: RealGroup, stage: StageName, netem: bool) -> list[str]:
    faults = []
    if group.loss:
        faults.append("loss: real exchanges cannot be made to fail; take packet_loss")
    if stage == "local":
        wanted = {
            "up_mbit_s": group.up_mbit_s,
            "down_mbit_s": group.down_mbit_s,
            "latency_s": own_latency(group),
            "packet_loss": group.packet_loss,
            "router": group.router,
            **_families(group),
        }
        faults += [
            f"{field}: stage local has no links; take --stage namespaces" for field, value in wanted.items() if value
        ]
    if stage == "docker" and group.copies is not None:
        faults.append("copies: stage docker keeps each home in its container; take --stage namespaces")
    if stage != "namespaces":
        if group.computers > 1:
            faults.append(f"computers: stage {stage} has one for each peer; take --stage namespaces")
        if group.cores is not None:
            faults.append(f"cores: stage {stage} does not limit CPU time; take --stage namespaces")
        faults += [
            f"troubles: stage {stage} has no disk that can fail ({trouble.what}); take --stage namespaces"
            for trouble in group.troubles
            if trouble.what in DISK_BREAKAGES
        ]
        faults += [
            f"troubles: stage {stage} has no networks that can change ({trouble.what}); take --stage namespaces"
            for trouble in group.troubles
            if trouble.what in NETWORK_EVENTS
        ]
    if stage == "docker":
        beyond = {
            "latency_s": not netem and own_latency(group),
            "packet_loss": not netem and group.packet_loss,
            "router": group.router,
            **_families(group),
            "clock_off_s": group.clock_off_s,
            "amid_exchange": group.amid_exchange,
            "troubles": [each.what for each in group.troubles if each.what not in (*DISK_BREAKAGES, *NETWORK_EVENTS)],
        }
        faults += [
            f"{field}: stage docker does not support this; take --stage namespaces"
            for field, value in beyond.items()
            if value
        ]
    return faults


def _families(group: RealGroup) -> dict[str, object]:
    return {"home": group.home, "ipv4": not group.ipv4, "ipv6": group.ipv6 != "none", "mtu": group.mtu}


def manifest_of(scenario: RealScenario) -> Manifest:
    """Return the manifest of a run that trains the scenario's learner ``lm``. Raises ManifestError if the scenario
    has no valid one.
    """
    from sim.learning import LanguageModelLearner
    from sim.lm.language import description, training

    learner = scenario.learner
    assert isinstance(learner, LanguageModelLearner)  # guaranteed by check()
    changes: dict[str, Any] = {
        "run.name": "laboratory",
        "run.seed": scenario.run.seed,
        "run.tokens": scenario.run_tokens,
        "model.config": description(learner).config.model_dump(),
        "training": training(learner, scenario.run_tokens, fold=1).model_dump(),
        "outer": scenario.outer.model_dump(),
        "codec": scenario.codec.model_dump(),
        "swarm": scenario.swarm.model_dump(),
        "admission.policy": scenario.admission,
    }
    return with_changes(preset("demo"), changes)
