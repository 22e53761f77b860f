"""``p2ptrain evaluate --tasks``: what lm-eval is asked and answers, by a stand-in and, if installed, by itself."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from p2ptrain.base.errors import UserError
from peer.home import Home
from peer.trained import task_scores
from peer.trained.evaluate_command import evaluate
from peer.trained.task_scores import Score, scores
from tests.peer.trained.published import ENDOFTEXT, IM_END, published

RESULTS = {
    "results": {
        "toy": {
            "alias": "toy",
            "acc,none": 0.25,
            "acc_stderr,none": 0.125,
            "exact_match,strict": 1.0,
            "exact_match_stderr,strict": "N/A",
            "name": "toy",
        }
    },
    "n-samples": {"toy": {"original": 40, "effective": 4}},
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(evaluate, [str(each) for each in arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace lm-eval by a stand-in that knows one task, and return what it is asked."""
    found: list[dict[str, Any]] = []

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        folder = Path(options["model_args"]["pretrained"])
        found.append(options | {"files": sorted(path.name for path in folder.iterdir())})
        return RESULTS

    manager = SimpleNamespace(match_tasks=lambda names: [each for each in names if each == "toy"])
    package, tasks, loader = (
        ModuleType("lm_eval"),
        ModuleType("lm_eval.tasks"),
        ModuleType("lm_eval.tasks._yaml_loader"),
    )
    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    tasks.TaskManager = lambda: manager  # type: ignore[attr-defined]
    loader.load_yaml = lambda path, resolve_func: {"task": path}  # type: ignore[attr-defined]
    for module in (package, tasks, loader):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(task_scores, "check_installed", lambda: None)
    return found


def test_scores_are_read_with_their_errors() -> None:
    assert scores(RESULTS) == [
        Score("toy", "acc", 0.25, 0.125, 4),
        Score("toy", "exact_match (strict)", 1.0, None, 4),
    ]
    assert scores(RESULTS)[0].shown() == "0.2500 ± 0.1250, from 4 examples"


@pytest.mark.usefixtures("in_process")
def test_a_homes_model_is_exported_for_it_and_removed(home: Home, asked: list[dict[str, Any]]) -> None:
    ran = run(home.path, "--tasks", "toy, own.yaml", "--examples", 4, "--device", "cpu")
    assert ran.exception is None, ran.output
    (options,) = asked
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(options["files"])
    assert not Path(options["model_args"]["pretrained"]).exists()
    assert options["model_args"]["trust_remote_code"] is False
    assert (options["tasks"], options["limit"], options["device"]) == (["toy", {"task": "own.yaml"}], 4, "cpu")
    assert "toy acc                   0.2500 ± 0.1250, from 4 examples" in ran.stdout


def test_a_folder_is_read_where_it_is(folder: Path, asked: list[dict[str, Any]]) -> None:
    ran = run(folder, "--tasks", "toy", "--json", "--device", "cpu")
    assert asked[0]["model_args"]["pretrained"] == str(folder)
    assert json.loads(ran.stdout)[0] == {
        "task": "toy",
        "metric": "acc",
        "value": 0.25,
        "standard_error": 0.125,
        "examples": 4,
    }
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights in safetensors format"):
        raise run(folder, "--tasks", "toy", "--device", "cpu").exception or AssertionError


@pytest.mark.parametrize(("tasks", "said"), [("toys", "lm-eval has no task 'toys'"), (" , ", "--tasks names no task")])
def test_an_unknown_task_is_a_sentence(folder: Path, asked: list[dict[str, Any]], tasks: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        raise run(folder, "--tasks", tasks, "--device", "cpu").exception or AssertionError
    assert asked == []


def test_a_failure_of_lm_eval_is_a_sentence(
    folder: Path, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(**_: Any) -> None:
        raise ConnectionError("Couldn't reach 'toy' on the Hub")

    monkeypatch.setattr("lm_eval.simple_evaluate", offline)
    error = run(folder, "--tasks", "toy", "--device", "cpu").exception
    assert isinstance(error, UserError)
    assert error.problem == "The package lm-eval could not evaluate (ConnectionError: Couldn't reach 'toy' on the Hub)."
    assert "internet connection" in error.remedy


def test_without_the_package_the_command_to_install_it_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = run(home.path, "--tasks", "toy").exception
    assert isinstance(error, UserError)
    assert error.problem == "--tasks needs the package lm-eval, which is not installed."
    assert "pip install -c constraints.txt -e '.[eval]'" in error.remedy


@pytest.mark.lab
def test_lm_eval_itself_scores_a_task_of_a_local_file(folder: Path, tmp_path: Path) -> None:
    """Check a multiple-choice task without a network; its data are a file."""
    pytest.importorskip("lm_eval", reason="the extra eval is optional")
    rows = [{"question": f"{number} is", "choices": [" even", " odd"], "answer": number % 2} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "parity.yaml").write_text(
        "task: parity\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        "doc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    ran = run(folder, "--tasks", tmp_path / "parity.yaml", "--json", "--device", "cpu")
    assert ran.exception is None, ran.output
    (score,) = json.loads(ran.stdout.splitlines()[-1])
    assert (score["task"], score["metric"], score["examples"]) == ("parity", "acc", 4)
    assert score["value"] in (0, 0.25, 0.5, 0.75, 1)


@pytest.mark.parametrize("names", [{}, {"config.json": {"eos_token_id": IM_END}}])
def test_a_folder_without_a_tokenizer_config_is_read_as_its_tokenizer_json(
    tmp_path: Path, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]
) -> None:
    folder = published(tmp_path / "model", {}, names.get("config.json", {}), None)
    (folder / "tokenizer_config.json").unlink()
    found = []

    def evaluated(folder: Path, *_: object) -> dict[str, Any]:
        found.append((AutoTokenizer.from_pretrained(folder), task_scores._prefix(folder)))
        return RESULTS

    monkeypatch.setattr(task_scores, "_evaluated", evaluated)
    ran = run(folder, "--tasks", "toy", "--device", "cpu")
    assert ran.exception is None, ran.output
    [(tokenizer, prefix)] = found
    assert (
        tokenizer("The cat's <|im_end|>").input_ids
        == Tokenizer.from_file(f"{folder}/tokenizer.json").encode("The cat's <|im_end|>").ids
    )
    assert tokenizer.eos_token_id == (IM_END if names else ENDOFTEXT)
    assert prefix == {}
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        raise run(folder, "--tasks", "toy", "--device", "cpu").exception or AssertionError
