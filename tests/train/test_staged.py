"""Trainers of several ranks beside one process, up to rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from staged_rank import FIELDS, HELD_OUT, Case, corpus, results, told, train, whole_task

from p2ptrain.train.evaluate import validation_loss

pytestmark = pytest.mark.net

CASES = {
    "two": [
        Case(),
        Case("GPT2LMHeadModel"),
        Case(optimizer="muon"),
        Case(clip=0.05),
        Case(compute="bfloat16"),
        Case(compute="float16"),
        Case("GPT2LMHeadModel", packed=True),
        Case(replicas=2),
        Case(replicas=2, optimizer="muon", tied=True),
    ],
    "three": [
        *(Case(architecture, 3) for architecture in FIELDS),
        Case(ranks=3, packed=True),
        Case(ranks=3, tied=True),
        Case("GPT2LMHeadModel", 3, tied=True),
    ],
    "four": [Case(ranks=4, replicas=2), Case(ranks=4, replicas=2, tied=True)],
}
PATHS = os.pathsep.join(str(Path(__file__).parent.parent / name) for name in ("", "train", "swarm"))


@pytest.mark.parametrize("number", CASES)
def test_ranks_train_as_one_process_does(number, tmp_path):
    cases = CASES[number]
    script = str(Path(__file__).parent / "staged_rank.py")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cases[0].ranks}")
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, script, str(tmp_path), told(cases)], env=environment, check=True, timeout=280)
    for index, case in enumerate(cases):
        task = whole_task(case)
        losses = train(task)
        held_out = validation_loss(task.model.module, corpus(case.manifest, case.packed), HELD_OUT, case.autocast).value
        rough = 1e-5 if case.autocast is None else 0.02
        for heard in json.loads((tmp_path / f"{index}.json").read_text()):
            assert heard["losses"] == pytest.approx(losses, rel=rough), case
            if heard["rank"] < case.mesh.stages:
                assert heard["held_out"] == pytest.approx(held_out, rel=rough), case
        parts = [load_file(tmp_path / f"{index}-{rank}.safetensors") for rank in range(case.ranks)]
        for name, expected in results(task).items():
            for replica in range(case.replicas):
                own = parts[replica * case.mesh.stages : (replica + 1) * case.mesh.stages]
                found = torch.cat([part[name] for part in own])
                assert (found - expected).norm() < 10 * rough * expected.norm(), (case, name)


def test_a_mesh_of_another_size_is_refused():
    assert replace(Case(), ranks=4, replicas=2).mesh.ranks == 4
