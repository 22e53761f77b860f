"""Fixture: a manifest for any corpus and tokenizer."""

import pytest

from p2ptrain.manifest import Manifest, preset, with_changes


@pytest.fixture(scope="session")
def manifest_with():
    """Return ``manifest_with(corpus, tokenizer)``: the demo run with other sections, given as tables."""

    def build(corpus: dict[str, object], tokenizer: dict[str, object] | None = None) -> Manifest:
        changes = {
            "corpus": {"validation_fraction": 0.1, **corpus},
            "tokenizer": tokenizer or {"kind": "bytes"},
            "training.sequence_length": 16,
            "model.config.vocab_size": 512,
        }
        return with_changes(preset("demo", "ab" * 32), changes)

    return build
