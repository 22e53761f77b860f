"""Export of a home's model in Hugging Face format: what transformers loads is what training had.

Beside what transformers saves, the files say which token ends a document, keep the tokenizer from adding tokens that
training never saw, and repeat fields under the names that older readers know. Each export is then loaded in a fresh
process and compared with the peer's own model and tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from p2ptrain import checkpoint
from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.base.launcher import launched
from p2ptrain.data.published_settings import CONFIG, GENERATION, TOKENIZER_CONFIG
from p2ptrain.data.tokenizer import SEPARATORS, Tokenizer
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.ports import HeldOutLoss
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS, ShardCorpus
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.model import summed_loss
from peer import loading
from peer.exported_chat import MESSAGES, ExportedChat, exported_chat
from peer.exported_tokens import ExportedTokens
from peer.home import Home
from peer.model import newest_checkpoint, run_settings, run_text, run_tokenizer, stored_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SAMPLE = (
    "To be, or not to be: don't  say 1234567890!\n\n\t\x00 Où est l'e\u0301té? Straße ﬁ Ā 日本語 🙂 "
    + " ".join(SEPARATORS)
    + " <s> the end "
)
"""Text on which tokenizers tend to differ: spaces, digits, normal forms, rare letters, tokens with a meaning."""

COMPARED_TOKENS = 2048
"""Held-out tokens whose text and loss are compared. Guess: the time on slow machines; they read them twice."""

LOAD_S = 1800.0
"""Timeout of the process that loads the export. Guess: measure the largest models on slow machines."""

TOLERANCE = 1e-3
"""Accepted difference of the losses, in nats; a tokenizer that is rebuilt raised the loss by 3.6. Guess: the
difference with other threads and versions of transformers."""


SHARD_BYTES = 2_000_000_000
"""Longest file of weights in bytes, unless one parameter is longer: every file system and file host takes it."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export."""

    signed: SignedManifest
    state: Mapping[str, Any]  # of the checkpoint
    held_out_loss: HeldOutLoss | None  # of the exported weights; None: not measured
    why_not: str = ""  # why the loss was not measured
    corpus: ShardCorpus | None = None  # None: the run's text is not here


Finish = Callable[[Path, Exported], None]
"""Called with the checked folder before it gets its name, to write more files into it."""


Tell = Callable[[str, str], None]
"""Called with an activity, and with how much of it is done or an empty string."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a program that loads the export has to compute."""

    request: loading.Request
    answer: loading.Answer


REBUILT = ("qwen2",)
"""Model types for which AutoTokenizer of transformers 5 ignores tokenizer_class and builds the original model's
tokenizer from our vocabulary (its list MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS). If auto_map is set, it takes
tokenizer_class, and with trust_remote_code=True the class that auto_map names, from a file of the export."""
CODE_FILE, CODE_CLASS = "own_tokenizer.py", "OwnTokenizer"
CODE = f'''"""The tokenizer in tokenizer.json, of which transformers 5 otherwise takes the vocabulary alone."""

from transformers import PreTrainedTokenizerFast


class {CODE_CLASS}(PreTrainedTokenizerFast):
    pass
'''


def export(
    home: Home,
    target: Path,
    tell: Tell = lambda activity, done: None,
    finish: Finish = lambda folder, exported: None,
) -> Exported:
    """Write model and tokenizer for ``from_pretrained``, atomically, and check that they load as training had them.

    Raises UserError, and leaves nothing at ``target``, if the files cannot be written or load as something else.
    """
    files.check_vacant(target)
    try:
        with _whole(target) as folder:
            exported, expected = _write(home, folder, tell)
            tell("checking that transformers loads the same model and tokenizer", "")
            _check(expected, _load(expected.request))
            finish(folder, exported)
    except (OSError, SafetensorError) as error:
        raise _unwritable(target, error) from error
    return exported


def _write(home: Home, folder: Path, tell: Tell) -> tuple[Exported, _Expected]:
    """Write all files. The model is freed on return, before another process loads its own copy."""

    def goes_on(read: int, wanted: int) -> bool:
        tell("reading the held-out text", f"{read:,} of {wanted:,} tokens")
        return True

    tell("reading the checkpoint", "")
    signed, found = newest_checkpoint(home)
    tokenizer = run_tokenizer(home, signed)
    settings = run_settings(home, signed)
    chat = exported_chat(home, signed, tokenizer, settings)
    tokens = ExportedTokens.of(tokenizer, chat, settings)
    model = stored_model(home, signed, found.tensors).module
    tell("writing the files", "")
    _write_model(folder, model, tokens)
    _write_tokenizer(folder, tokenizer, model.config, chat, tokens)
    corpus, why_not = _held_out(home, signed.manifest)
    loss = None if corpus is None else validation_loss(model, corpus, HELD_OUT_TOKENS, goes_on=goes_on)
    exported = Exported(signed, found.state, loss, why_not, corpus)
    return exported, _expected(folder, model, tokenizer, chat, corpus)


def _held_out(home: Home, manifest: Manifest) -> tuple[ShardCorpus | None, str]:
    """Return the run's text, or why there is none here."""
    try:
        return run_text(home, manifest), ""
    except UserError as error:
        return None, error.problem.rstrip(".")


def _expected(
    folder: Path,
    module: PreTrainedModel,
    tokenizer: Tokenizer,
    chat: ExportedChat | None,
    corpus: ShardCorpus | None,
) -> _Expected:
    rows = [tokenizer.encode_batch([SAMPLE])[0][: module.config.max_position_embeddings].tolist()]
    texts = [SAMPLE]
    if corpus is not None:
        rows = [_sequence(row) for batch in corpus.validation_batches(COMPARED_TOKENS, 1) for row in batch]
        texts += [tokenizer.decode(row) for row in rows]
    prompt_ids = [] if chat is None else chat.prompt_ids
    plain = [] if chat is not None else tokenizer.encode_batch(texts)
    marked = [] if chat is None else [ids for ids, _ in tokenizer.encode_marked(texts)]
    ids = [[*tokenizer.prefix, *each.tolist()] for each in [*plain, *marked]]
    with torch.no_grad():
        total = sum(float(summed_loss(module, torch.tensor([row]), None)) for row in rows)
    loss = total / sum(len(row) - 1 for row in rows)
    return _Expected(
        request={
            "folder": str(folder),
            "texts": texts,
            "rows": rows,
            "messages": MESSAGES if prompt_ids else [],
        },
        answer={"ids": ids, "trusting_ids": ids, "loss": loss, "prompt_ids": prompt_ids},
    )


def _sequence(row: torch.Tensor) -> list[int]:
    """Return a held-out sequence; of packed dialogues [3, T] the first one."""
    if row.dim() == 1:
        return row.tolist()
    inputs, _, positions = row
    starts = (positions == 0).nonzero().flatten().tolist()
    return inputs[: [*starts, len(inputs)][1]].tolist()


def _write_model(folder: Path, module: PreTrainedModel, tokens: ExportedTokens) -> None:
    """Write weights and configuration."""
    from transformers.utils import logging

    config = module.config
    # transformers generates as its own file says, other readers as the model's configuration does
    for each in (config, module.generation_config):
        each.use_cache = True  # training turns it off
        each.eos_token_id, each.bos_token_id, each.pad_token_id = tokens.end, tokens.begin, tokens.pad
    logging.disable_progress_bar()
    # transformers puts tensors of one storage into one file, and all of a flat model have one
    weights = module.state_dict()
    apart = {each.data_ptr(): each for each in weights.values()}
    apart = {place: each.clone() for place, each in apart.items()}  # tied weights stay one
    state = {name: apart[each.data_ptr()] for name, each in weights.items()}
    module.save_pretrained(folder, state_dict=state, max_shard_size=SHARD_BYTES)
    for path in folder.glob("*.safetensors"):  # which the library lets only the owner read
        path.chmod((folder / CONFIG).stat().st_mode)
    _edit(folder / CONFIG, **_older_names(config))
    _edit(folder / GENERATION, **tokens.generation())


def _older_names(config: PretrainedConfig) -> dict[str, object]:
    """Return fields as transformers 4, and converters written for it, read them."""
    if config.model_type == "gpt2":
        return {"n_ctx": config.max_position_embeddings}
    rope = config.rope_parameters
    if config.model_type == "gpt_neox":
        return {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    if config.model_type == "gemma3_text":
        theta, local = (rope[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention"))
        return {"rope_theta": theta, "rope_local_base_freq": local}
    if rope["rope_type"] == "llama3":
        kept = ("rope_theta", "partial_rotary_factor")
        scaling = {name: value for name, value in rope.items() if name not in kept}
        return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    return {"rope_theta": rope["rope_theta"]}


def _write_tokenizer(
    folder: Path, tokenizer: Tokenizer, config: PretrainedConfig, chat: ExportedChat | None, tokens: ExportedTokens
) -> None:
    """Write the tokenizer's files so that ``AutoTokenizer`` gives training's ids, and the chat template.

    With a template, special tokens in a text are special, as ``apply_chat_template`` needs them.
    """
    tokenizer.save(folder)
    unwanted = {"truncation": None, "padding": None} | ({} if tokenizer.prefix else {"post_processor": None})
    saved = _edit(folder / "tokenizer.json", **unwanted)
    changes: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(tokenizer.prefix),
        "add_eos_token": False,
        "add_prefix_space": _adds_prefix_space(saved["pre_tokenizer"] or {}),
        "split_special_tokens": chat is None and _splits_special_tokens(tokenizer, saved["added_tokens"]),
        "model_max_length": config.max_position_embeddings,
    }
    if chat is not None:
        chat.write(folder)
        changes["chat_template"] = chat.template  # older readers know no other place
    if config.model_type in REBUILT:
        (folder / CODE_FILE).write_text(CODE, encoding="utf-8")
        changes["auto_map"] = {"AutoTokenizer": [None, f"{CODE_FILE.removesuffix('.py')}.{CODE_CLASS}"]}
    # transformers would add others, and then find them in ordinary text, too
    added = {token["content"] for token in saved["added_tokens"]}
    changes |= dict.fromkeys(("bos_token", "eos_token")) | {
        name: text for name, text in tokens.texts.items() if text in added
    }
    _edit(folder / TOKENIZER_CONFIG, **changes)


def _adds_prefix_space(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer begins a text with a space.

    tokenizer_config.json has to repeat it: transformers 4 otherwise turns it off, and llama.cpp's converter reads it.
    """
    return pre_tokenizer.get("add_prefix_space", pre_tokenizer.get("prepend_scheme", "never") != "never")


def _splits_special_tokens(tokenizer: Tokenizer, added_tokens: list[dict[str, Any]]) -> bool:
    """Return whether training encodes the literal text of a special token as ordinary text."""
    special = [token for token in added_tokens if token["special"]]
    encoded = tokenizer.encode_batch([token["content"] for token in special])
    return any(token["id"] not in ids for ids, token in zip(encoded, special, strict=True))


def _edit(path: Path, **changes: Any) -> dict[str, Any]:
    """Change members of a JSON file, and return all. Raises OSError."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return document


def _load(request: loading.Request) -> loading.Answer:
    """Load the export in a fresh process, without network. Raises UserError if that fails or takes ``LOAD_S``."""
    remedy = "Free some memory if it ran out, or upgrade transformers; then export again. Nothing was written."
    with tempfile.TemporaryDirectory() as modules:  # to which transformers copies code of the export
        try:
            result = subprocess.run(
                launched(sys.executable, "-P", loading.__file__, HF_HUB_OFFLINE="1", HF_MODULES_CACHE=modules),
                input=json.dumps(request),
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=LOAD_S,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"The export was not loaded by transformers within {LOAD_S:g} s.", remedy) from None
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise UserError(f"The export cannot be loaded by transformers: {reason}.", remedy)
    answer: loading.Answer = json.loads(result.stdout.splitlines()[-1])
    return answer


def _check(expected: _Expected, loaded: loading.Answer) -> None:
    """Raise UserError if the loaded model or tokenizer is not the one of training."""
    texts, ids = expected.request["texts"], expected.answer["ids"]
    for option, theirs in ("", loaded["ids"]), (" with trust_remote_code=True", loaded["trusting_ids"]):
        for text, wanted, found in zip(texts, ids, theirs, strict=True):
            if wanted != found:
                raise _different(
                    f"AutoTokenizer{option} makes {len(found):,} ids of a text of {len(text):,} letters, and training "
                    f"made {len(wanted):,}; number {_first_difference(wanted, found):,} differs"
                )
    if loaded["prompt_ids"] != expected.answer["prompt_ids"]:
        raise _different("apply_chat_template makes other ids of a dialogue than training did")
    ours, loss = expected.answer["loss"], loaded["loss"]
    if not abs(ours - loss) <= TOLERANCE:  # also if either is not a number
        raise _different(f"AutoModelForCausalLM has a loss of {loss:.4f}, and the peer's model {ours:.4f}")


def _first_difference(wanted: list[int], found: list[int]) -> int:
    """Return the number of the first id that differs, counted from 1."""
    pairs = zip(wanted, found, strict=False)
    return 1 + next(
        (place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(wanted), len(found))
    )


def _different(what: str) -> UserError:
    return UserError(
        f"The export does not load as what was trained: {what}.",
        "Export with another version of transformers, and report this message. Nothing was written.",
    )


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is moved to ``target`` on success and removed on an error.

    The target is absent or an empty directory. An existing one is kept, since it may be a mount point or a shell's
    working directory.
    """
    is_there = target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = (target if is_there else target.parent) / f".writing-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
        if is_there:
            for path in folder.iterdir():
                path.rename(target / path.name)
        else:
            folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unwritable(target: Path, error: Exception) -> UserError:
    remedy = files.remedy(checkpoint.system_error(error))
    return UserError(f"{target} cannot be written: {checkpoint.plainly(error)}.", remedy)
