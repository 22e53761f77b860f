"""The model section of a published model, from its ``config.json``: untrusted JSON of transformers 4 or 5.

transformers reads the file, and its configuration is compared with the one that a run would have: a field that differs
may change what the model computes, and is refused. Ignored are names, token ids, settings of the generation, number
types, and dropout, which this package sets to zero. A field that the file leaves out has the class's default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args

from pydantic import ValidationError

from p2ptrain.base.errors import ManifestError
from p2ptrain.base.text import one_line
from p2ptrain.manifest.decoder import MAX_POSITIONS, Decoder
from p2ptrain.manifest.faults import error_lines, shown
from p2ptrain.manifest.model import Model
from p2ptrain.manifest.section import Section

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
}
"""Architectures of supported models by ``model_type``."""

_NAMES = {
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "hidden_act": ("hidden_act", "hidden_activation", "activation_function"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "hidden_size": ("n_embd", "hidden_size"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}
"""The file's names of fields of our section, where a family has another one."""

_UNREAD_NAMES = """
    tokenizer_class torch_dtype use_bfloat16 torchscript auto_class name_or_path sep_token_id cls_token_id unk_token_id
    tie_encoder_decoder is_decoder pretraining_tp gradient_checkpointing use_flash_attn attention_dropout hidden_dropout
    classifier_dropout resid_pdrop embd_pdrop attn_pdrop attention_probs_dropout_prob hidden_dropout_prob
    summary_first_dropout summary_type summary_use_proj summary_activation summary_proj_to_labels n_ctx num_labels
    task_specific_params finetuning_task prefix max_window_layers unsloth_fixed unsloth_version is_llama_config
    transformers.js_config output_past max_sequence_length neftune_noise_alpha attn_implementation
    rope_theta rope_scaling rotary_emb_base rotary_pct partial_rotary_factor rope_local_base_freq
    sliding_window_pattern no_rope_layer_interval use_sliding_window max_position_embeddings
"""
_UNREAD = frozenset(_UNREAD_NAMES.split())
"""Fields that do not change what a model computes, or that transformers expresses by others."""
_MOST_SHOWN = 5  # Names in one message, which then fits on a few lines.


def model_section(config: Mapping[str, object]) -> Decoder:
    """Return the manifest's section of the model that ``config.json`` describes.

    ``max_position_embeddings`` may become smaller. Rotary positions do not read it, so it is cut to the largest value
    of a manifest. A sliding window in a family whose section has none is left out, and the value cut to the window, up
    to which all positions see each other. For sequences of this length the model computes the same.

    Args:
        config: the decoded file, untrusted.

    Raises ManifestError for another family, and for what the section cannot express.
    """
    architecture = _architecture(config)
    published = _read(config)
    values = {name: _value(name, published) for name in _section_of(architecture).model_fields}
    windowless = "sliding_window" not in values and getattr(published, "sliding_window", None) is not None
    if architecture != "GPT2LMHeadModel" and type(most := values["max_position_embeddings"]) is int:
        bounds = [published.sliding_window] if windowless else []
        values["max_position_embeddings"] = min(most, MAX_POSITIONS, *bounds)
    sizes = {name: value for name, value in values.items() if value is not None}
    names = {own: next((each for each in others if hasattr(published, each)), own) for own, others in _NAMES.items()}
    model = _checked({"architecture": architecture, "config": sizes}, names)
    _compare(published, model, {"sliding_window", "layer_types"} if windowless else set())
    return model


def _architecture(config: Mapping[str, object]) -> str:
    kind, classes = config.get("model_type"), config.get("architectures")
    named = classes[0] if isinstance(classes, Sequence) and not isinstance(classes, str) and classes else None
    found = FAMILIES.get(kind) if isinstance(kind, str) else None
    if found is None or named not in (None, found):
        raise ManifestError(
            f"The model's config.json has model_type {shown(kind)} and architecture {shown(named)}, of which no run "
            "can be made.",
            f"Choose a causal language model with one of these model types: {', '.join(FAMILIES)}.",
        )
    return found


def _section_of(architecture: str) -> type[Section]:
    variants = {
        get_args(each.model_fields["architecture"].annotation)[0]: each for each in get_args(get_args(Model)[0])
    }
    section: type[Section] = variants[architecture].model_fields["config"].annotation
    return section


def _read(config: Mapping[str, object]) -> Any:
    """Return transformers' configuration. Raises ManifestError."""
    from transformers import CONFIG_MAPPING

    for name in ("num_hidden_layers", "n_layer"):  # transformers makes lists of this length
        if type(layers := config.get(name, 1)) is not int or not 0 < layers <= 256:
            _refuse(f"{name} is {shown(layers)}, and a run has 1 to 256 layers")
    stated = {name: value for name, value in config.items() if name != "num_labels"}  # another length
    try:
        found: Any = CONFIG_MAPPING[str(config["model_type"])].from_dict(stated)
        if getattr(found, "n_inner", 0) is None:  # GPT-2's default
            found.n_inner = 4 * found.n_embd
        return found
    except Exception as error:  # of transformers' checks there are many
        _refuse(f"transformers cannot read it ({one_line(f'{type(error).__name__}: {error}', 200)})")


def _refuse(problem: str) -> NoReturn:
    raise ManifestError(
        f"The model's config.json cannot become a run's model section: {problem}.",
        "Choose another model: a run would compute something else than this one does.",
    )


def _value(name: str, published: Any) -> object:
    """Return a field of our section; None if the file has none."""
    rope = getattr(published, "rope_parameters", None) or {}
    match name:
        case "rope_theta":
            return _as_float(rope.get("full_attention", rope).get("rope_theta"))
        case "rope_local_base_freq":
            return _as_float(rope.get("sliding_attention", {}).get("rope_theta"))
        case "rope_scaling" if rope.get("rope_type") == "llama3":
            scaling = {each: _as_float(value) for each, value in rope.items() if each not in _ROPE}
            return scaling | {_ORIGINAL: rope[_ORIGINAL]} if _ORIGINAL in rope else scaling
        case "rope_scaling":
            return None
        case "head_dim":
            usual = published.hidden_size // max(1, published.num_attention_heads)
            is_stated = published.model_type in ("qwen3", "gemma3_text")
            return published.head_dim if is_stated or published.head_dim != usual else None
        case "sliding_window_pattern":
            stated = getattr(published, name, getattr(published, "_sliding_window_pattern", None))
            return _interval(stated, [each == "full_attention" for each in published.layer_types])
        case "no_rope_layer_interval":
            return _interval(published.no_rope_layer_interval, [each == 0 for each in published.no_rope_layers])
    own = next(each for each in _NAMES.get(name, (name,)) if hasattr(published, each))
    value = getattr(published, own)
    return _as_float(value) if name in ("initializer_range", "norm_epsilon") else value


_ORIGINAL = "original_max_position_embeddings"
_ROPE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL})


def _as_float(value: object) -> object:
    """Return an integer as a float, which JSON does not distinguish; other values unchanged."""
    try:
        return float(value) if type(value) is int else value
    except OverflowError:  # no field allows it
        return value


def _interval(stated: object, marks: Sequence[bool]) -> object:
    """Return n if every n-th layer is marked, as ``stated`` or else by the first mark; ``_compare`` checks the rest."""
    if type(stated) is int and stated > 0 and all(mark == (at % stated == 0) for at, mark in enumerate(marks, 1)):
        return stated
    return [*marks, True].index(True) + 1


class _Holder(Section):
    """Root of the locations in error messages."""

    model: Model


def _checked(section: Mapping[str, object], names: Mapping[str, str]) -> Decoder:
    """Return the checked section. Raises ManifestError, which has the ``names`` of the fields in the file."""
    data = {"model": section}
    try:
        model = _Holder.model_validate(data).model
        lines = model.shape_faults()
    except ValidationError as error:
        lines = error_lines(error, _Holder, ("model",))
    if lines:
        text = re.sub(r"\b(?:model\.config\.)?(\w+)", lambda word: names.get(word[1], word[1]), "\n".join(lines))
        raise ManifestError(
            "The model's config.json cannot become a run's model section:\n" + text,
            "Choose another model, or correct the file if it is yours.",
        )
    return model


def _compare(published: Any, model: Decoder, left_out: set[str]) -> None:
    """Raise ManifestError if a run of this section would compute something else than the published model."""
    from transformers import GenerationConfig, PreTrainedConfig

    own = type(published)(**model.config_arguments())
    found, wanted = (_plain(each.to_dict()) for each in (published, own))
    unread = _UNREAD | left_out | GenerationConfig().to_dict().keys() | PreTrainedConfig().to_dict().keys()
    if found.get("head_dim") == model.head_size:
        left_out = left_out | {"head_dim"}
    differing = [
        name
        for name in sorted(found.keys() - (unread - {"tie_word_embeddings"}) - left_out)
        if not name.startswith("_") and found[name] != wanted.get(name) and (name in wanted or _is_on(found[name]))
    ]
    if known := [name for name in differing if name in wanted]:
        name = known[0]
        _refuse(f"{name} is {shown(found[name])}, and a run has only {shown(wanted[name])}")
    if differing:
        more = f" and {len(differing) - _MOST_SHOWN} more" if len(differing) > _MOST_SHOWN else ""
        raise ManifestError(
            "The model's config.json has fields that p2ptrain does not know, and that may change what the model "
            f"computes: {', '.join(map(shown, differing[:_MOST_SHOWN]))}{more}.",
            "If they change nothing, remove them from the config.json of a copy of the model.",
        )


def _is_on(value: object) -> bool:
    return value not in (None, False, [], {}, "")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without what says that all of each head is rotated."""

    def plain(rope: Any) -> Any:
        if not isinstance(rope, dict):
            return rope
        return {name: plain(value) for name, value in rope.items() if (name, value) != ("partial_rotary_factor", 1.0)}

    return {**config, "rope_parameters": plain(config.get("rope_parameters"))}
