"""The two forms of a manifest: TOML for people, canonical bytes for machines."""

from __future__ import annotations

import itertools
import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.base.errors import ManifestError
from p2ptrain.base.ids import PROTOCOL_VERSION
from p2ptrain.manifest import PRESETS, Manifest, parse_toml, preset, render_toml, with_changes
from p2ptrain.manifest.document import canonical_bytes, differences, run_id
from p2ptrain.manifest.faults import validated

few = settings(max_examples=30)


@pytest.mark.parametrize("name", PRESETS)
def test_toml_reads_back(name: str) -> None:
    manifest = preset(name, "0" * 64)
    assert parse_toml(render_toml(manifest)) == manifest


def test_every_field_of_the_toml_has_a_comment_above_it(manifest: Manifest) -> None:
    lines = render_toml(manifest).split("\n")
    for above, line in itertools.pairwise(lines):
        if line and not line.startswith("#"):
            assert above.startswith("# "), line
    assert max(map(len, lines)) <= 120


def test_canonical_bytes_are_frozen_for_ever(manifest: Manifest) -> None:
    assert run_id(manifest) == "fd57a17525f86b6023eb58d6705a1a9cf6be27ba50d4ebd1e4f69a0692d17424"
    # Frozen earlier: protocol version 4, with topk, which recipe swarm no longer accepts.
    earlier = canonical_bytes(manifest).replace(b'"protocol":12', b'"protocol":4')
    earlier = earlier.replace(b'"tokens":', b'"tokens_per_peer":')
    assert sha256(earlier).hexdigest() == "06022cb24660204f455f1228509a70f937471ce6abf76b3f9135383ef3c52f49"
    before = earlier.replace(b'"gradients":"int8"', b'"gradients":"topk"')
    assert sha256(before).hexdigest() == "c755f7eef33525c8ad45327757a683b32ddaef12c1d2a0ffdf85d981323b3a0f"


def test_order_and_spelling_do_not_change_the_digest(data: dict[str, Any], manifest: Manifest) -> None:
    backwards = {name: dict(reversed(section.items())) for name, section in reversed(data.items())}
    backwards["swarm"]["final_gossip_s"] = 20
    assert canonical_bytes(validated(backwards)) == canonical_bytes(manifest)


def test_canonical_bytes_hold_every_field_and_no_white_space(data: dict[str, Any], manifest: Manifest) -> None:
    canonical = canonical_bytes(manifest)
    assert json.loads(canonical) == data
    assert canonical.isascii()
    assert b": " not in canonical
    assert b", " not in canonical


@few
@given(
    learning_rate=st.floats(min_value=1e-300, max_value=1),
    momentum=st.floats(min_value=0, max_value=1, exclude_max=True),
    seed=st.integers(0, 2**63 - 1),
    name=st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,62}[A-Za-z0-9])?", fullmatch=True),
)
def test_any_numbers_survive_toml_and_json(learning_rate: float, momentum: float, seed: int, name: str) -> None:
    changes = {"training.learning_rate": learning_rate, "outer.momentum": momentum, "run.seed": seed, "run.name": name}
    manifest = with_changes(preset("demo", "0" * 64), changes)
    assert canonical_bytes(parse_toml(render_toml(manifest))) == canonical_bytes(manifest)
    assert canonical_bytes(validated(json.loads(canonical_bytes(manifest)))) == canonical_bytes(manifest)


@few
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        parse_toml(text)


@pytest.mark.parametrize(
    "text", ["[run", "x = " + "[" * 30_000, "x = " + "9" * 5000, "x = 1\n" * 2, "run = 1979-05-27", "# " + "x" * 70_000]
)
def test_hostile_toml_is_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        parse_toml(text)


def test_another_protocol_version_is_refused_before_its_fields_are_read(manifest: Manifest) -> None:
    other = PROTOCOL_VERSION + 1
    text = render_toml(manifest).replace(f"protocol = {PROTOCOL_VERSION}", f"protocol = {other}\nnovelty = true")
    with pytest.raises(ManifestError) as caught:
        parse_toml(text)
    assert f"uses protocol version {other}, this p2ptrain uses {PROTOCOL_VERSION}" in caught.value.problem


def test_differences_name_fields_with_both_values(manifest: Manifest) -> None:
    assert differences(manifest, manifest) == []
    shards = {"kind": "shards", "root": "ab" * 32, "training_tokens": 9_000, "held_out_tokens": 1_000}
    changes = {"outer.inner_steps": 20, "codec.name": "fp32", "corpus": shards}
    lines = differences(manifest, with_changes(manifest, changes))
    assert "outer.inner_steps: 10 -> 20" in lines
    assert "codec.name: 'int8' -> 'fp32'" in lines
    assert "corpus.training_tokens: absent -> 9000" in lines
    assert "corpus.name: 'shakespeare' -> absent" in lines


def test_changes_are_checked(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match=r"inner_step: unknown field; did you mean outer\.inner_steps"):
        with_changes(manifest, {"outer.inner_step": 20})
    with pytest.raises(ManifestError, match=r"sworm: unknown section"):
        with_changes(manifest, {"sworm.final_gossip_s": 1.0})


def test_a_run_that_cuts_evenly_keeps_its_name_said_or_unsaid(data: dict[str, Any], manifest: Manifest) -> None:
    said = validated(data | {"outer": data["outer"] | {"cut": "even"}})
    assert run_id(said) == run_id(manifest)
    assert "cut" not in json.loads(canonical_bytes(said))["outer"]
    whole = with_changes(manifest, {"outer.cut": "layers"})
    assert run_id(whole) != run_id(manifest)
    assert parse_toml(render_toml(whole)) == whole
    assert differences(manifest, whole) == ["outer.cut: absent -> 'layers'"]
    with pytest.raises(ManifestError, match=r"outer\.cut: .*did you mean layers"):
        with_changes(manifest, {"outer.cut": "layer"})


def test_an_open_run_keeps_its_name_said_or_unsaid(data: dict[str, Any], manifest: Manifest) -> None:
    said = validated(data | {"admission": {"policy": "open"}})
    assert run_id(said) == run_id(manifest)
    assert "admission" not in json.loads(canonical_bytes(said))
    private = with_changes(manifest, {"admission.policy": "invite"})
    assert run_id(private) != run_id(manifest)
    assert parse_toml(render_toml(private)) == private
    assert differences(manifest, private) == ["admission.policy: absent -> 'invite'"]
    with pytest.raises(ManifestError, match=r"admission\.policy: .*did you mean invite"):
        with_changes(manifest, {"admission.policy": "invites"})
