"""Initial weights that a manifest may name: a commit of the hub or digests of files, never a path."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest import Manifest, with_changes
from p2ptrain.manifest.document import canonical_bytes, parse_toml, render_toml, run_id

REVISION = "0123456789abcdef0123456789abcdef01234567"
DIGESTS = ["ab" * 32, "cd" * 32]


@pytest.mark.parametrize(
    "table", [{"kind": "hub", "name": "owner/na.me", "revision": REVISION}, {"kind": "file", "sha256": DIGESTS}]
)
def test_published_weights_make_another_run(manifest: Manifest, table: dict[str, Any]) -> None:
    changed = with_changes(manifest, {"model.init": table})
    assert changed.model.init is not None
    assert changed.model.init.model_dump() == table
    assert changed == parse_toml(render_toml(changed))
    assert run_id(changed) != run_id(manifest)


def test_random_weights_are_unsaid(manifest: Manifest) -> None:
    """Check that the RunId of a run that begins from random weights does not depend on the field."""
    assert b'"init"' not in canonical_bytes(manifest)
    assert "init =" not in render_toml(manifest)
    assert run_id(with_changes(manifest, {"model.init": None})) == run_id(manifest)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("/etc/passwd", "model.init: input should be a table of fields, found '/etc/passwd'"),
        (
            {"kind": "hub", "name": "owner/name", "revision": "main"},
            "model.init.revision: found 'main'; wanted: Full commit hash",
        ),
        (
            {"kind": "hub", "name": "../name", "revision": REVISION},
            "model.init.name: found '../name'; wanted: Repository on the hub",
        ),
        ({"kind": "file", "sha256": ["ab"]}, "model.init.sha256[0]: found 'ab'; wanted: SHA-256 of each"),
        ({"kind": "path"}, "model.init.kind: 'path' is not known; it may be hub, file"),
        ({"kind": "file", "path": "/etc/passwd"}, "model.init.path: unknown field"),
        ({"kind": "file", "sha256": []}, "model.init.sha256: list should have at least 1 item"),
        ({"kind": "file", "sha256": [f"{n:064x}" for n in range(65)]}, "model.init.sha256: list should have at most"),
        ({"kind": "file", "sha256": [DIGESTS[0]] * 2}, "a file is named twice"),
        (5, "model.init: input should be a table of fields, found 5"),
    ],
)
def test_everything_else_is_refused(manifest: Manifest, source: Any, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        with_changes(manifest, {"model.init": source})
    assert said in caught.value.problem
