"""Scores of a model in the tasks of EleutherAI's lm-eval, an optional package.

lm-eval loads a folder in Hugging Face format, so a home's model is exported first, into a temporary one. It gets the
tasks' data sets from the hub, and reads tasks of one's own from YAML files.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.base.documents import install_extra
from p2ptrain.base.errors import P2pTrainError, UserError
from p2ptrain.base.text import one_line

EXTRA = "eval"
"""Extra of setup.cfg that installs lm-eval."""

TOKENIZER_CONFIG = "tokenizer_config.json"

Tell = Callable[[str], None]
"""Called with an activity."""


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str
    """Name of the metric, and of the filter of answers if there is one."""
    value: float
    standard_error: float | None
    examples: int
    """Examples that were scored."""

    def shown(self) -> str:
        """Return value, standard error and number of examples for people."""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return f"{self.value:.4f}{error}, from {self.examples:,} examples"


def check_installed() -> None:
    """Raise UserError unless lm-eval is installed. Does not import it."""
    if importlib.util.find_spec("lm_eval") is None or importlib.util.find_spec("accelerate") is None:
        raise UserError(
            "--tasks needs the package lm-eval, which is not installed.",
            f"{install_extra(EXTRA)} In a clone: pip install -c constraints.txt -e '.[{EXTRA}]'",
        )


def score(
    model: Path,
    is_home: bool,
    tasks: Sequence[str],
    examples: int | None,
    device: str,
    tell: Tell,
) -> list[Score]:
    """Return the scores of a home's or a folder's model.

    Args:
        model: a peer's home, or a folder in Hugging Face format.
        is_home: which of both.
        tasks: names or patterns of lm-eval's tasks, or paths that end in .yaml.
        examples: number of examples of each task, the first ones; None: all.
        device: name as of ``choose_device``.

    Raises UserError.
    """
    from p2ptrain.data.hub import huggingface_hub
    from p2ptrain.train.accelerator import choose_device

    check_installed()
    chosen = choose_device(device, is_exact=True)
    huggingface_hub()  # turns off its telemetry
    tell("loading lm-eval")
    specs = _found(tasks)
    with ExitStack() as stack:
        folder = model
        if is_home:
            from peer.exporting import export
            from peer.home import Home

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2ptrain-evaluate-"))) / "model"
            export(Home(model), folder, lambda activity, done: tell(f"exporting: {activity} {done}"))
        else:
            from peer.trained.model_folder import weight_files

            weight_files(folder)  # raises UserError without safetensors
            if not (folder / TOKENIZER_CONFIG).is_file():
                folder = _with_tokenizer_config(
                    folder, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2ptrain-evaluate-")))
                )
        tell("evaluating")
        return scores(_evaluated(folder, specs, examples, str(chosen)))


def _found(tasks: Sequence[str]) -> list[Any]:
    """Return what lm-eval calls the tasks: names, or the contents of files. Raises UserError if one is unknown."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    known, found = TaskManager(), []
    for task in tasks:
        if task.endswith((".yaml", ".yml")):
            try:
                found.append(load_yaml(task, resolve_func=True))
            except Exception as error:
                raise UserError(
                    f"The task {one_line(task)} cannot be read: {one_line(str(error))}.", "Name a task file of lm-eval."
                ) from error
            continue
        names = known.match_tasks([task])
        if not names:
            raise UserError(
                f"The package lm-eval has no task {one_line(task)!r}.",
                "Choose one that `lm-eval ls tasks` lists, or the path of a .yaml file.",
            )
        found += names
    if not found:
        raise UserError("--tasks names no task.", "Name one, as in: --tasks lambada_openai,hellaswag")
    return found


def _evaluated(folder: Path, specs: list[Any], examples: int | None, device: str) -> dict[str, Any]:
    """Return lm-eval's results. Its errors, and those of the hub, become a UserError."""
    import lm_eval

    arguments = {"pretrained": str(folder), "dtype": "float32", "trust_remote_code": False, "use_safetensors": True}
    arguments |= _prefix(folder)
    try:
        found = lm_eval.simple_evaluate(
            model="hf", model_args=arguments, tasks=specs, device=device, limit=examples, log_samples=False
        )
    except P2pTrainError:
        raise
    except Exception as error:
        raise UserError(
            f"The package lm-eval could not evaluate ({one_line(f'{type(error).__name__}: {error}')}).",
            "Check the internet connection, from which it gets the tasks' data sets, or choose other tasks.",
        ) from error
    results: dict[str, Any] = found or {"results": {}}
    return results


def _prefix(folder: Path) -> dict[str, int]:
    """Return the id that stands before a text without context, if the tokenizer names none: what ends a document."""
    from p2ptrain.data.published_settings import PublishedSettings
    from peer.trained.model_folder import folder_tokenizer

    if PublishedSettings.read(folder).tokens.keys() & {"bos_token", "eos_token"}:
        return {}
    return {"prefix_token_id": folder_tokenizer(folder)[0].separator or 0}


def _with_tokenizer_config(folder: Path, target: Path) -> Path:
    """Return a folder with the same files and the description by which transformers takes tokenizer.json as it is."""
    from peer.trained.model_folder import folder_tokenizer

    tokenizer, _ = folder_tokenizer(folder)
    named = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.separator_text}
    special = {name: text for name, text in named.items() if text in tokenizer.special_tokens}
    described = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    for path in folder.iterdir():
        (target / path.name).symlink_to(path.resolve())
    (target / TOKENIZER_CONFIG).write_text(json.dumps(described), encoding="utf-8")
    return target


def scores(found: dict[str, Any]) -> list[Score]:
    """Return the metrics in lm-eval's results: entries ``metric,filter`` beside ``metric_stderr,filter``."""
    listed = []
    counts = found.get("n-samples", {})
    for task, entries in found["results"].items():
        for key, value in entries.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = entries.get(f"{metric}_stderr,{kind}")
            is_known = isinstance(error, int | float) and math.isfinite(error)
            name = metric if kind == "none" else f"{metric} ({kind})"
            examples = int(counts.get(task, {}).get("effective", 0))
            listed.append(Score(str(task), name, float(value), float(error) if is_known else None, examples))
    return listed
