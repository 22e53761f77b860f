"""The model card is true: each number is that of the manifest, the checkpoint or the receipts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import yaml
from people import GUEST, ISSUER, NOW, STRANGER, Somebody

from p2ptrain.manifest import SignedManifest, parameter_count
from p2ptrain.ports import HeldOutLoss
from p2ptrain.receipts import Receipt, Total, total
from peer.trained.model_card import CardFacts, TextSize, card, escaped

SWARM = {"outer.recipe": "swarm", "outer.exchanges_per_step": 2, "run.tokens": 64_000}


def facts(signed: SignedManifest, **changes: Any) -> CardFacts:
    state = {"step": 1_234, "progress": 32_000.25, "tokens": 16_384, "val_loss_first": 5.5452, "peer": GUEST.peer}
    found = CardFacts(
        signed,
        state | {"val_loss_first_tokens": 8_192},
        HeldOutLoss(2.34567, 65_536, 65_536),
        TextSize(4_802_560, 251_904),
        None,
        "me/model",
        "apache-2.0",
    )
    return replace(found, **changes)


def rows(text: str) -> dict[str, str]:
    """Return the tables of a card with two columns."""
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, flags=re.MULTILINE))


def front_matter(text: str) -> Any:
    return yaml.safe_load(text.split("---\n")[1])


def receipts(signed: SignedManifest) -> Total:
    """Return receipts of two partners, one with another peer's signature that does not hold."""

    def receipt(partner: Somebody, since: int, exchanges: int, signer: Somebody) -> Receipt:
        made = Receipt(GUEST.peer, partner.peer, since, since + 86_400, 9, 16_000 + since - NOW, exchanges, 5, 6, 7)
        return made.signed(signed.run_id, signer.state)

    made = [
        receipt(ISSUER, NOW, 3, ISSUER),
        receipt(STRANGER, NOW, 4, STRANGER),
        receipt(ISSUER, NOW + 90_000, 1_000, STRANGER),
    ]
    return total(made, signed.run_id, GUEST.peer, NOW + 1e6)


def test_each_number_is_the_true_one(signed_run: Callable[..., SignedManifest]) -> None:
    signed = signed_run(**SWARM)
    manifest = signed.manifest
    text = card(facts(signed, receipts=receipts(signed), names_peer=True))
    found = rows(text)
    training, outer = manifest.training, manifest.outer
    assert found["run id"] == f"`{signed.run_id}`"
    assert found["author's key"] == f"`{manifest.run.public_key}`"
    assert found["protocol version"] == str(manifest.run.protocol)
    assert found["checkpoint"] == "outer step 1,234"
    assert found["tokens of all peers"].startswith("32,000 of 64,000 (50.0 %)")
    assert found["published by peer"] == f"`{GUEST.peer}`"
    assert (found["tokens for training"], found["tokens held out"]) == ("4,802,560", "251,904")
    assert found["parameters"] == f"{parameter_count(manifest.model):,}"
    for name, value in manifest.model.config.model_dump().items():
        assert found[f"`{name}`"] == f"`{value}`"
    assert found["recipe"] == "`swarm`"
    assert found["learning rate"] == f"{training.learning_rate:g} at its peak, schedule {training.schedule}"
    assert found["batch"] == f"{training.sequences_per_step} sequences of {training.sequence_length} tokens"
    assert found["inner steps per outer step"] == str(outer.inner_steps)
    assert found["exchanges per outer step"] == "2"
    assert found["codec"] == manifest.codec.name
    assert found["seed"] == str(manifest.run.seed)
    assert found["partners with valid receipts"] == "2"
    assert found["exchanges"] == "7"
    assert found["sent and received in exchanges"] == "10 and 12 bytes"
    assert found["weights given to newcomers"] == "14 bytes"
    assert found["tokens in the receipts"] == "16,000"
    assert "1 more do not hold and are not counted" in text
    assert "says that it trained on 16,384 tokens itself; nobody can verify that" in text
    assert "held-out loss of 2.3457 nats per token (perplexity 10.44), from 65,536 tokens" in text
    assert "Before the publishing peer's first step it was 5.5452, from 8,192 tokens" in text


def test_the_metadata_are_what_the_hub_reads(signed_run: Callable[..., SignedManifest]) -> None:
    shards = {"kind": "shards", "root": "0" * 64, "training_tokens": 99_000, "held_out_tokens": 1_000}
    mirror = "hf:someone/tokens"
    text = card(facts(signed_run(corpus=shards | {"mirror": mirror})))
    assert front_matter(text) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["p2ptrain"],
    }
    assert f"| SHA-256 of the index of the tokens | `{'0' * 64}` |" in text
    assert "| tokens for training | 99,000 |" in text
    assert "license" not in front_matter(card(facts(signed_run(), licence=None)))


def test_weights_from_which_the_run_began_are_named_with_their_licence(
    signed_run: Callable[..., SignedManifest],
) -> None:
    begun = {"kind": "hub", "name": "someone/base", "revision": "1" * 40}
    text = card(facts(signed_run(model__init=begun)))
    assert front_matter(text)["base_model"] == "someone/base"
    assert f"trained from the weights of `someone/base` at revision `{'1' * 40}`" in text
    assert (
        f"- It began from the weights of `someone/base` at revision `{'1' * 40}`; their licence applies, too." in text
    )
    text = card(facts(signed_run(model__init={"kind": "file", "sha256": ["2" * 64]})))
    assert "base_model" not in front_matter(text)
    assert f"the weights of a file with SHA-256 `{'2' * 64}`; their licence applies, too." in text
    assert "their licence" not in card(facts(signed_run()))


def test_it_says_which_files_another_run_of_it_needs(signed_run: Callable[..., SignedManifest]) -> None:
    assert "\np2ptrain bootstrap RUN\n```\n\n## Data" in card(facts(signed_run()))
    digests = [f"{each}" * 64 for each in range(1, 7)]
    corpus = {
        "kind": "shards",
        "root": digests[0],
        "training_tokens": 9_000,
        "held_out_tokens": 1_000,
        "template": digests[1],
    }
    init = {"kind": "file", "sha256": digests[3:5], "settings": digests[5]}
    text = card(facts(signed_run(corpus=corpus, tokenizer={"kind": "file", "sha256": digests[2]}, model__init=init)))
    assert "\np2ptrain bootstrap RUN --weights PATH\n```" in text
    listed = re.findall(r"^- (.*): SHA-256 `(.)\2{63}`$", text, flags=re.MULTILINE)
    assert sorted(listed) == [
        ("index", "1"),
        ("template", "2"),
        ("tokenizer", "3"),
        ("weights 1 of 2", "4"),
        ("weights 2 of 2", "5"),
    ]


def test_what_is_not_known_is_not_claimed(signed_run: Callable[..., SignedManifest]) -> None:
    text = card(facts(signed_run(), loss=None, text=None, state={"step": 3}))
    assert "The held-out loss of the published weights was not measured." in text
    assert "tokens for training" not in text
    assert "first step" not in text
    assert "The publishing peer has no receipts of partners." in text
    assert "by one peer, alone" in text  # recipe local
    assert "exchanges per outer step" not in text


def test_text_of_strangers_has_no_meaning_in_markdown() -> None:
    evil = "<script>alert(1)</script> [x](http://evil) | `code` **bold** ![i](u)\n# head\x1b[31m"
    safe = escaped(evil)
    assert "\n" not in safe
    assert "\x1b" not in safe
    assert re.search(r"(?<!\\)[<>\[\]()|`*#!]", safe) is None
