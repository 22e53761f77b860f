"""Sources of text and tokenizers that a manifest may name: never a path."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest import Manifest, with_changes

DIGEST = "ab" * 32
SHARDS = {"kind": "shards", "root": DIGEST, "training_tokens": 9_000, "held_out_tokens": 1_000}


def test_what_is_empty_is_unsaid(manifest: Manifest) -> None:
    assert with_changes(manifest, {"corpus": SHARDS}).corpus.model_dump() == SHARDS
    more = {"mirror": "hf:owner/name", "template": "chatml", "end_of_turn": "</s>"}
    assert with_changes(manifest, {"corpus": SHARDS | more}).corpus.model_dump() == SHARDS | more


def test_the_shipped_text_is_read_as_bytes(manifest: Manifest) -> None:
    tokenizer = {"kind": "file", "sha256": DIGEST}
    assert with_changes(manifest, {"corpus": SHARDS, "tokenizer": tokenizer}).tokenizer.kind == "file"
    with pytest.raises(ManifestError, match=r"corpus\.kind: builtin is read as bytes"):
        with_changes(manifest, {"corpus": {"kind": "builtin", "name": "shakespeare"}, "tokenizer": tokenizer})


@pytest.mark.parametrize(
    "source",
    [
        "/etc/passwd",
        "../text.txt",
        "file:text.txt",
        "",
        {"kind": "builtin", "name": "goethe"},
        "hf:owner/name",
        f"sha256:{DIGEST}",
        {"kind": "file", "sha256": DIGEST},
        {"kind": "hub", "name": "owner/name", "revision": "0" * 40},
        SHARDS | {"root": "/etc/passwd"},
        SHARDS | {"training_tokens": 0},
        SHARDS | {"mirror": "ftp://example.org"},
        SHARDS | {"mirror": "shards"},
        SHARDS | {"template": "t.jinja"},
        SHARDS | {"end_of_turn": "x" * 65},
        SHARDS | {"path": "/etc/passwd"},
        {"kind": "path"},
        {},
        5,
    ],
)
def test_everything_else_is_refused(manifest: Manifest, source: Any) -> None:
    with pytest.raises(ManifestError) as caught:
        with_changes(manifest, {"corpus": source})
    assert caught.value.problem.startswith("corpus")


def test_an_unknown_kind_names_the_known_ones(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match=r"tokenizer\.kind: 'bites' is not known; did you mean bytes\?"):
        with_changes(manifest, {"tokenizer": {"kind": "bites"}})
    with pytest.raises(ManifestError, match=r"tokenizer\.kind: 'q' is not known; it may be bytes, file"):
        with_changes(manifest, {"tokenizer": {"kind": "q"}})
