"""Values that a manifest may have, and the messages to its author for all others."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from p2ptrain.base.codec_names import FRAGMENT_ALIGNMENT
from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest import Manifest, parameter_count, with_changes
from p2ptrain.manifest.faults import validated
from p2ptrain.manifest.schema import CodecSection


def problem_of(data: dict[str, Any]) -> str:
    with pytest.raises(ManifestError) as caught:
        validated(data)
    return caught.value.problem


def problem_after(manifest: Manifest, **changes: Any) -> str:
    """Return the message about one changed field; keyword ``outer__inner_steps`` stands for ``outer.inner_steps``."""
    with pytest.raises(ManifestError) as caught:
        with_changes(manifest, {name.replace("__", "."): value for name, value in changes.items()})
    return caught.value.problem


def test_a_manifest_is_frozen(manifest: Manifest) -> None:
    with pytest.raises(ValidationError):
        manifest.run.seed = 8


def test_derived_token_counts(manifest: Manifest) -> None:
    assert manifest.training.tokens_per_step == 256
    assert manifest.tokens_per_outer_step == 2560


@pytest.mark.parametrize(
    ("section", "typo", "line"),
    [
        ("training", "inner_steps", "training.inner_steps: unknown field; did you mean outer.inner_steps?"),
        ("corpus", "root", "corpus.root: unknown field"),
        ("model", "auto_map", "model.auto_map: unknown field"),
        ("run", "zzzzzzz", "run.zzzzzzz: unknown field"),
    ],
)
def test_an_unknown_field_is_named(data: dict[str, Any], section: str, typo: str, line: str) -> None:
    data[section][typo] = 1
    assert line in problem_of(data).split("\n")


@pytest.mark.parametrize(
    ("right", "typo"),
    [
        ("training.learning_rate", "training.learning_rte"),
        ("outer.fragments", "outer.fragment"),
        ("outer.inner_steps", "training.inner_steps"),
        ("corpus.validation_fraction", "corpus.validation_fractoin"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_one(data: dict[str, Any], right: str, typo: str) -> None:
    (section, name), (home, word) = right.split("."), typo.split(".")
    value = data[section].pop(name)
    data[home][word] = value
    assert f"{typo}: unknown field; did you mean {right}?" in problem_of(data).split("\n")


def test_no_suggestion_points_to_a_field_of_another_variant(data: dict[str, Any]) -> None:
    data["corpus"]["splt"] = "train"
    assert "did you mean" not in problem_of(data)


def test_an_unknown_field_inside_the_model_config_gets_its_full_path(data: dict[str, Any]) -> None:
    data["model"]["config"]["hiden_size"] = data["model"]["config"].pop("hidden_size")
    assert "model.config.hiden_size: unknown field; did you mean model.config.hidden_size?" in problem_of(data)


def test_a_misspelt_section_is_both_unknown_and_missing(data: dict[str, Any]) -> None:
    data["outr"] = data.pop("outer")
    assert problem_of(data).split("\n") == ["outer: missing", "outr: unknown section; did you mean outer?"]


def test_all_problems_are_reported_at_once_one_line_each(data: dict[str, Any]) -> None:
    del data["run"]["seed"]
    data["training"]["learning_rate"] = -1.0
    data["codec"]["name"] = "int9"
    lines = problem_of(data).split("\n")
    assert lines[0] == "run.seed: missing"
    assert lines[1].startswith("training.learning_rate:")
    assert lines[1].endswith("found -1.0")
    assert lines[2].startswith("codec.name:")
    assert lines[2].endswith("found 'int9'; did you mean int8?")


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("run", "seed", True),
        ("run", "seed", 1.0),
        ("run", "seed", "1"),
        ("run", "seed", -1),
        ("run", "name", "two\nlines"),
        ("run", "name", "\x1b[2Jgone"),
        ("run", "name", " blank"),
        ("run", "name", "n" * 65),
        ("run", "public_key", "AB" * 32),
        ("outer", "nesterov", 1),
        ("outer", "inner_steps", 0),
        ("outer", "momentum", 1.0),
        ("training", "learning_rate", float("nan")),
        ("training", "learning_rate", float("inf")),
        ("training", "schedule", "linear"),
        ("corpus", "validation_fraction", 0.6),
        ("swarm", "final_gossip_s", float("inf")),
    ],
)
def test_a_bad_value_is_refused_and_its_field_named(data: dict[str, Any], section: str, field: str, value: Any) -> None:
    data[section][field] = value
    problem = problem_of(data)
    assert problem.startswith(f"{section}.{field}: ")
    assert problem.isprintable()


def test_a_whole_number_may_stand_for_a_real_one(data: dict[str, Any]) -> None:
    data["training"]["gradient_clip"] = 1
    assert repr(validated(data).training.gradient_clip) == "1.0"


def test_names_and_values_of_strangers_are_escaped_and_shortened(data: dict[str, Any]) -> None:
    data["run"]["\x1b[31m" + "x" * 500] = 1
    data["run"]["name"] = "\x07" * 500
    problem = problem_of(data)
    assert all(line.isprintable() and len(line) < 300 for line in problem.split("\n"))
    assert problem.count("…'") == 2  # a shortened quote is closed


def test_a_flood_of_problems_is_cut(data: dict[str, Any]) -> None:
    data["run"] |= {f"field_{index}": 0 for index in range(1000)}
    lines = problem_of(data).split("\n")
    assert len(lines) == 21
    assert lines[-1] == "and 980 more"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"outer__recipe": "local"}, "outer.exchanges_per_step: 1, and recipe local exchanges nothing; set it to 0"),
        (
            {"outer__exchanges_per_step": 0},
            "outer.exchanges_per_step: 0, and recipe swarm would train every peer alone",
        ),
        ({"outer__recipe": "swarn"}, "outer.recipe: unknown recipe 'swarn'; did you mean swarm?"),
        ({"outer__recipe": "diloco"}, "over the network use diloco with topology complete"),
        (
            {"outer__recipe": "dilocox_global", "outer__exchanges_per_step": 0},
            "dilocox_global averages over all peers at once",
        ),
        ({"outer__recipe": "gasloc"}, "outer.exchanges_per_step: 1, and recipe gasloc plans its exchanges"),
        (
            {
                "outer__recipe": "factored_gossip_half",
                "outer__exchanges_per_step": 0,
                "outer__fragments": 1,
                "outer__fragments_per_exchange": 1,
            },
            "outer.fragments: 1, and recipe factored_gossip_half mixes a part of the fragments; set at least 2",
        ),
        ({"outer__partners": 2}, "outer.partners: 2, and recipe swarm has one partner at a time; set it to 1"),
        ({"outer__partners": 2, "outer__recipe": "gasloc", "outer__exchanges_per_step": 0}, None),
        ({"outer__partners": 2, "outer__recipe": "local", "outer__exchanges_per_step": 0}, None),
        ({"outer__recipe": "ad_psgd"}, "outer.inner_steps: 10, and recipe ad_psgd mixes after every inner step"),
        ({"outer__fragments_per_exchange": 5}, "outer.fragments_per_exchange: 5 exceeds outer.fragments, 4"),
        ({"outer__cut": "layers", "outer__fragments": 4000}, "outer.fragments: 4000 is too many for this model"),
        (
            {"outer__cut": "layers", "outer__fragments": 1, "outer__fragments_per_exchange": 1},
            "outer.cut: layers, and one fragment is not cut; set outer.fragments to at least 2, or even",
        ),
        ({"outer__fragments": 4000}, "outer.fragments: 4000 is too many for this model; at most 128"),
        (
            {"training__sequence_length": 129},
            "training.sequence_length: 129 exceeds model.config.max_position_embeddings, 128",
        ),
        ({"training__warmup_tokens": 100_001}, "training.warmup_tokens: 100001 exceeds run.tokens, 100000"),
        ({"training__sequences_per_step": 65_536, "training__sequence_length": 128}, None),
        ({"codec__block_size": 1000}, "codec.block_size: 1000 does not divide 1024"),
        ({"codec__gradients": "topk"}, "codec.gradients: topk, and recipe swarm mixes no pseudo-gradients"),
        ({"codec__gradients": "lowrank", "outer__recipe": "swarm_both"}, None),
        ({"codec__gradients": "lowrank", "codec__adaptive": True, "outer__recipe": "dilocox"}, None),
        (
            {"codec__gradients": "lowrank", "codec__adaptive": True, "outer__recipe": "swarm_both"},
            "codec.adaptive: true, and recipe swarm_both has a fixed rank; leave it out, or choose recipe dilocox",
        ),
        (
            {"codec__adaptive": True, "outer__recipe": "dilocox"},
            "codec.adaptive: true, and int8 has no rank; set codec.gradients to lowrank",
        ),
        (
            {"codec__gradients": "bf16", "outer__recipe": "gasloc", "outer__exchanges_per_step": 0},
            "codec.gradients: bf16, and recipe gasloc mixes no pseudo-gradients, so it would have no effect; set"
            " it to int8 or fp32",
        ),
        ({"codec__gradients": "fp32"}, None),
        ({"codec__name": "modular4", "outer__recipe": "swarm_gradients"}, None),
        ({"model__config__vocab_size": 255}, "model.config.vocab_size: 255 is below the 256 ids of tokenizer bytes"),
        ({"model__config__num_attention_heads": 5}, "model.config.hidden_size: 64 is not a multiple of"),
        ({"model__config__num_key_value_heads": 3}, "model.config.num_key_value_heads: 3 does not divide"),
        ({"model__config__hidden_size": 20}, "an attention head is 5 wide, and rotary positions need an even width"),
        ({"run__tokens": 2_559}, "run.tokens: 2559 ends the run before its first outer step"),
    ],
)
def test_fields_must_agree(manifest: Manifest, changes: dict[str, Any], line: str | None) -> None:
    if line is None:
        changes |= {"run__tokens": 10**12}
        with_changes(manifest, {name.replace("__", "."): value for name, value in changes.items()})
    else:
        assert line in problem_after(manifest, **changes)


def test_recipe_local_without_exchanges_is_fine(manifest: Manifest) -> None:
    local = with_changes(manifest, {"outer.recipe": "local", "outer.exchanges_per_step": 0})
    assert local.outer.recipe == "local"


def test_the_author_chooses_the_size(manifest: Manifest) -> None:
    """Check that nothing is built: a peer judges by its memory whether it takes part (``train.memory``)."""
    huge = {"hidden_size": 16_384, "num_hidden_layers": 64, "num_attention_heads": 128, "intermediate_size": 65_536}
    changed = with_changes(manifest, {f"model.config.{name}": value for name, value in huge.items()})
    assert parameter_count(changed.model) > 200e9


def test_size_caps_hold_before_anything_is_built(manifest: Manifest) -> None:
    logits = {
        "model__config__vocab_size": 262_144,
        "model__config__max_position_embeddings": 131_072,
        "training__sequence_length": 131_072,
    }
    assert "logits for a single sequence" in problem_after(manifest, **logits)
    batch = {"training__sequences_per_step": 65_536, "training__sequence_length": 128, "run__tokens": 10**12}
    wide = {"model__config__max_position_embeddings": 1024} | batch | {"training__sequence_length": 1024}
    assert "tokens per inner step" in problem_after(manifest, **wide)


def test_the_fragment_limit_matches_the_parameters(manifest: Manifest) -> None:
    most = parameter_count(manifest.model) // FRAGMENT_ALIGNMENT
    assert with_changes(manifest, {"outer.fragments": most}).outer.fragments == most


def test_literals_agree_with_the_numeric_core() -> None:
    from p2ptrain import codec

    names = CodecSection.model_fields["name"].annotation.__args__
    assert [codec.get(name, 1024).name for name in names] == list(names)
