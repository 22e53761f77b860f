"""Model card of a run's model in Markdown: what its manifest, checkpoint and receipts say. Pure.

Each number is one of these sources'. The card says which of them are proven, and which are one peer's own statement.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2ptrain.base.ids import key_of
from p2ptrain.data.file_store import SETTINGS, WEIGHTS_OPTION, named_files
from p2ptrain.manifest import SignedManifest, parameter_count
from p2ptrain.manifest import Tokenizer as TokenizerSpec
from p2ptrain.ports import HeldOutLoss
from p2ptrain.receipts import Total
from p2ptrain.recipes import RECIPES
from p2ptrain.tokens.builtin import DIGESTS

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TextSize:
    """Size of the run's text in tokens."""

    train: int
    """Tokens that training predicts in one epoch."""
    held_out: int


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Everything that a card says."""

    signed: SignedManifest
    state: Mapping[str, Any]
    """State of the checkpoint that is published."""
    loss: HeldOutLoss | None
    """Held-out loss of the published weights; None: not measured."""
    text: TextSize | None
    """None: the run's text is not where the card is written."""
    receipts: Total | None
    """What the publishing peer's receipts prove; None: it has none."""
    repository: str
    """Name on the hub, owner/name."""
    licence: str | None
    names_peer: bool = False
    """Whether the card names the publishing peer."""


def card(facts: CardFacts) -> str:
    """Return the text of README.md: YAML metadata, then Markdown."""
    sections = [
        _front_matter(facts),
        f"# {escaped(facts.signed.manifest.run.name)}\n\n{_summary(facts)}",
        "## Run\n\n" + _table(_run_rows(facts)) + "\n\n" + _again(facts),
        "## Data\n\n" + _table(_data_rows(facts)),
        "## Model\n\n" + _table(_model_rows(facts)),
        "## Training\n\n" + _table(_training_rows(facts)),
        "## Peers\n\n" + _peers(facts),
        "## Held-out loss\n\n" + _losses(facts),
        "## Use\n\n" + _use(facts),
        "## Limitations\n\n" + _limitations(facts),
    ]
    return "\n\n".join(sections) + "\n"


def escaped(text: str) -> str:
    """Return text on one line that Markdown shows as it is: its punctuation has no meaning, HTML neither."""
    plain = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return re.sub(r"([\\`*_{}\[\]<>()#+\-.!|~&$:/@])", r"\\\1", plain)


def initial_weights(signed: SignedManifest) -> Any:
    """Return the manifest's ``model.init``, published weights from which the run began; None: random ones."""
    return getattr(signed.manifest.model, "init", None)


def _front_matter(facts: CardFacts) -> str:
    begun = initial_weights(facts.signed)
    data: dict[str, Any] = {}
    if facts.licence is not None:
        data["license"] = facts.licence
    data |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["p2ptrain"]}
    if begun is not None and begun.kind == "hub":
        data["base_model"] = begun.name
    lines = [f"{name}: {json.dumps(value)}" for name, value in data.items()]  # JSON is YAML
    return "\n".join(["---", *lines, "---"])


def _summary(facts: CardFacts) -> str:
    manifest, begun = facts.signed.manifest, initial_weights(facts.signed)
    model = manifest.model
    how = (
        "peers that each trained and averaged with others, without a server" if _exchanges(facts) else "one peer, alone"
    )
    begins = "random weights" if begun is None else f"the weights of {_source(begun)}"
    return (
        f"A language model of {parameter_count(model):,} parameters ({model.architecture}), trained from {begins} with "
        f"p2ptrain by {how}. This card was written from the run's signed manifest, a checkpoint, and the receipts of "
        "the peer that published it."
    )


def _exchanges(facts: CardFacts) -> bool:
    """Return whether peers of the run exchange anything."""
    return RECIPES[facts.signed.manifest.outer.recipe].exchanges


def _source(spec: Any) -> str:
    """Name weights or a tokenizer."""
    if spec.kind == "hub":
        return f"`{spec.name}` at revision `{spec.revision}`"
    digests = [spec.sha256] if isinstance(spec.sha256, str) else spec.sha256
    return "a file with SHA-256 " + ", ".join(f"`{each}`" for each in digests)


def _run_rows(facts: CardFacts) -> Rows:
    signed, state = facts.signed, facts.state
    run, progress = signed.manifest.run, float(state.get("progress", 0.0))
    rows = [
        ("name", escaped(run.name)),
        ("run id", f"`{signed.run_id}`"),
        ("author's key", f"`{run.public_key}`"),
        ("protocol version", str(run.protocol)),
        ("checkpoint", f"outer step {int(state['step']):,}"),
        (
            "tokens of all peers",
            f"{progress:,.0f} of {run.tokens:,} ({100 * min(progress / run.tokens, 1):.1f} %), as the publishing peer "
            "estimates them",
        ),
    ]
    if facts.names_peer and key_of(str(state.get("peer"))) is not None:
        rows.append(("published by peer", f"`{state['peer']}`"))
    return rows


def _again(facts: CardFacts) -> str:
    manifest = facts.signed.manifest
    needed = [each for each in named_files(manifest) if each.what != SETTINGS]
    options = f" {WEIGHTS_OPTION} PATH" if any(each.option == WEIGHTS_OPTION for each in needed) else ""
    lacks = ""
    if needed:
        listed = "".join(f"\n- {each.what}: SHA-256 `{each.sha256}`" for each in needed)
        shards = " The shards of its text go to `RUN/shards`." if manifest.corpus.kind == "shards" else ""
        lacks = (
            "\n\nIt needs files that are not in this repository; the run's author may have them. Each goes to "
            f"`RUN/files`, with its SHA-256 as its name, but weights.{shards}\n{listed}"
        )
    return (
        "`manifest.signed` describes the whole run. To train it again, begin it on a reachable computer, and "
        "join by the link that this prints:\n\n"
        f"```sh\nmkdir RUN && cp manifest.signed RUN\np2ptrain bootstrap RUN{options}\n```{lacks}"
    )


def _data_rows(facts: CardFacts) -> Rows:
    manifest = facts.signed.manifest
    corpus = manifest.corpus
    rows: list[tuple[str, str]] = [("kind", corpus.kind)]
    if corpus.kind == "builtin":
        rows += [
            ("text", f"{corpus.name}, which ships with p2ptrain"),
            ("SHA-256", f"`{DIGESTS[corpus.name]}`"),
        ]
        rows.append(("held out", f"{100 * corpus.validation_fraction:g} % of the tokens"))
        if facts.text is not None:
            rows += [("tokens for training", f"{facts.text.train:,}"), ("tokens held out", f"{facts.text.held_out:,}")]
    else:
        assert corpus.kind == "shards"
        rows += [
            ("tokens for training", f"{corpus.training_tokens:,}"),
            ("tokens held out", f"{corpus.held_out_tokens:,}"),
            ("SHA-256 of the index of the tokens", f"`{corpus.root}`"),
        ]
        if corpus.mirror:
            rows.append(("mirror of the tokens", f"`{escaped(corpus.mirror)}`"))
        if corpus.template:
            rows.append(("chat template", f"`{corpus.template}`"))
    rows.append(("tokenizer", _tokenizer(manifest.tokenizer)))
    return rows


def _tokenizer(spec: TokenizerSpec) -> str:
    return "bytes" if spec.kind == "bytes" else _source(spec)


def _model_rows(facts: CardFacts) -> Rows:
    model = facts.signed.manifest.model
    rows = [
        ("architecture", model.architecture),
        ("parameters", f"{parameter_count(model):,}"),
    ]
    rows += [(f"`{name}`", f"`{value}`") for name, value in model.config.model_dump(mode="json").items()]
    return rows


def _training_rows(facts: CardFacts) -> Rows:
    manifest = facts.signed.manifest
    training, outer, codec = manifest.training, manifest.outer, manifest.codec
    inner = [
        ("recipe", f"`{outer.recipe}`"),
        ("inner optimizer", training.optimizer),
        ("learning rate", f"{training.learning_rate:g} at its peak, schedule {training.schedule}"),
        ("warm-up", f"{training.warmup_tokens:,} tokens of all peers"),
        ("weight decay", f"{training.weight_decay:g}"),
        ("gradient clip", f"{training.gradient_clip:g}"),
        ("batch", f"{training.sequences_per_step:,} sequences of {training.sequence_length:,} tokens"),
        ("inner steps per outer step", f"{outer.inner_steps:,}"),
        ("seed", str(manifest.run.seed)),
    ]
    if not _exchanges(facts):
        return inner
    return [
        *inner,
        (
            "outer optimizer",
            f"learning rate {outer.learning_rate:g}, momentum {outer.momentum:g}"
            f"{', Nesterov' if outer.nesterov else ''}",
        ),
        ("exchanges per outer step", f"{outer.exchanges_per_step:,}"),
        ("fragments", f"{outer.fragments:,}, {outer.fragments_per_exchange:,} in one exchange"),
        ("codec", codec.name),
    ]


def _peers(facts: CardFacts) -> str:
    total, tokens = facts.receipts, int(facts.state.get("tokens", 0))
    claims = f"The publishing peer says that it trained on {tokens:,} tokens itself; nobody can verify that."
    if total is None or not total.receipts:
        return f"The publishing peer has no receipts of partners. {claims}"
    days = [time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (total.first, total.last)]
    rows = [
        ("partners with valid receipts", f"{len(total.partners):,}"),
        ("receipts", f"{total.receipts:,}, from {days[0]} to {days[1]} (UTC)"),
        ("exchanges", f"{total.exchanges:,}"),
        ("sent and received in exchanges", f"{total.sent:,} and {total.received:,} bytes"),
        ("weights given to newcomers", f"{total.served:,} bytes"),
        ("tokens in the receipts", f"{total.tokens:,}"),
    ]
    faulty = sum(total.faulty.values())
    rejected = f" {faulty:,} more do not hold and are not counted." if faulty else ""
    return (
        f"{_table(rows)}\n\nProven: the keys of the publishing peer and of each partner have both signed these "
        f"exchanges and bytes.{rejected} Claimed: tokens, which no partner can verify; and one person may own several "
        f"keys. {claims} Other peers of the run have receipts of their own, which are not counted here."
    )


def _losses(facts: CardFacts) -> str:
    parts = []
    if facts.loss is not None:
        parts.append(
            f"The published weights have a held-out loss of {facts.loss.value:.4f} nats per token (perplexity "
            f"{math.exp(min(facts.loss.value, 700.0)):,.2f}), from {facts.loss.tokens:,} tokens."
        )
    else:
        parts.append("The held-out loss of the published weights was not measured.")
    first = facts.state.get("val_loss_first")
    if isinstance(first, float) and math.isfinite(first):
        read = int(facts.state.get("val_loss_first_tokens") or 0)
        parts.append(f"Before the publishing peer's first step it was {first:.4f}, from {read:,} tokens.")
    return " ".join(parts)


def _use(facts: CardFacts) -> str:
    name = json.dumps(facts.repository)
    load = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({name})\nmodel = AutoModelForCausalLM.from_pretrained({name})\n"
    )
    corpus = facts.signed.manifest.corpus
    if corpus.kind == "builtin" or not corpus.template:
        return (
            f"```python\n{load}"
            'ids = tokenizer("Once", return_tensors="pt").input_ids\n'
            "print(tokenizer.decode(model.generate(ids, max_new_tokens=100, do_sample=True)[0]))\n```"
        )
    return (
        "The model was taught dialogues in the form of the chat template that is in `chat_template.jinja`.\n\n"
        f"```python\n{load}"
        'messages = [{"role": "user", "content": "Hello"}]\n'
        "prompt = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
        ")\n"
        "answer = model.generate(**prompt, max_new_tokens=100, do_sample=True)[0]\n"
        'print(tokenizer.decode(answer[prompt["input_ids"].shape[1] :], skip_special_tokens=True))\n```'
    )


def _limitations(facts: CardFacts) -> str:
    window = facts.signed.manifest.training.sequence_length
    who = {"open": "Anybody could take part", "invite": "Peers with an invite took part"}.get(
        facts.signed.manifest.admission.policy, "Peers that the author admitted took part"
    )
    begun = initial_weights(facts.signed)
    licence = [] if begun is None else [f"- It began from the weights of {_source(begun)}; their licence applies, too."]
    return "\n".join(
        [
            f"- It was trained on sequences of {window:,} tokens and may be worse on longer ones.",
            "- It repeats what its data say, errors and prejudices included; nothing filters its answers.",
            f"- {who} in the training. p2ptrain limits what an adversarial peer can do, but cannot exclude it.",
            "- No peer knows the licence of the data; check it before you use the model.",
            *licence,
        ]
    )


def _table(rows: Rows) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
