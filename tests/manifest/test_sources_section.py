"""Sources of text and tokenizers that a manifest may name: never a path."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest import Manifest, with_changes

REVISION = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "ab" * 32


def test_short_strings_stand_for_tables(manifest: Manifest) -> None:
    changed = with_changes(manifest, {"corpus": f"hf:owner/na.me@{REVISION}", "tokenizer": f"sha256:{DIGEST}"})
    assert changed.corpus.model_dump() == {
        "kind": "hub",
        "name": "owner/na.me",
        "revision": REVISION,
        "config": "default",
        "split": "train",
        "text_field": "text",
        "max_tokens": 100_000_000,
        "validation_fraction": 0.05,
    }
    assert changed.tokenizer.model_dump() == {"kind": "file", "sha256": DIGEST}


@pytest.mark.parametrize("short", ["builtin:shakespeare", f"sha256:{DIGEST}"])
def test_other_short_corpora(manifest: Manifest, short: str) -> None:
    assert with_changes(manifest, {"corpus": short}).corpus.kind in short.replace("sha256", "file")


def test_short_tokenizers(manifest: Manifest) -> None:
    assert with_changes(manifest, {"tokenizer": "bytes"}).tokenizer.kind == "bytes"
    assert with_changes(manifest, {"tokenizer": f"hf:owner/name@{REVISION}"}).tokenizer.kind == "hub"


@pytest.mark.parametrize(
    "source",
    [
        "/etc/passwd",
        "../text.txt",
        "file:text.txt",
        "",
        "builtin:/etc/passwd",
        "builtin:goethe",
        f"hf:../name@{REVISION}",
        f"hf:owner/../name@{REVISION}",
        f"hf:owner/name/more@{REVISION}",
        f"hf:name@{REVISION}",
        "hf:owner/name@main",
        "hf:owner/name",
        f"hf:owner/name@{REVISION}\n",
        "sha256:abc",
        {"kind": "file", "path": "/etc/passwd"},
        {"kind": "file", "sha256": "/etc/passwd"},
        {"kind": "hub", "name": "csv", "revision": REVISION},
        {"kind": "hub", "name": "owner/name", "revision": REVISION, "split": "train[:10]"},
        {"kind": "hub", "name": "owner/name", "revision": REVISION, "config": "../other"},
        {"kind": "hub", "name": "owner/name", "revision": REVISION, "data_files": "/etc/passwd"},
        {"kind": "hub", "name": "owner/name", "revision": REVISION, "max_tokens": 10**12},
        {"kind": "path"},
        {},
        5,
    ],
)
def test_everything_else_is_refused(manifest: Manifest, source: Any) -> None:
    with pytest.raises(ManifestError) as caught:
        with_changes(manifest, {"corpus": source})
    assert caught.value.problem.startswith("corpus")


def test_a_moving_revision_is_explained(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match=r"corpus\.revision: found 'main'; wanted: Full commit hash"):
        with_changes(manifest, {"corpus": "hf:owner/name@main"})


def test_an_unknown_kind_names_the_known_ones(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match=r"tokenizer\.kind: 'bites' is not known; did you mean bytes\?"):
        with_changes(manifest, {"tokenizer": {"kind": "bites"}})
    with pytest.raises(ManifestError, match=r"tokenizer\.kind: 'q' is not known; it may be bytes, hub, file"):
        with_changes(manifest, {"tokenizer": {"kind": "q"}})
