"""Readers of the fields of a published model's ``config.json``, for ``model_config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest.decoder import MAX_POSITIONS
from p2ptrain.manifest.faults import shown

_MOST_SHOWN = 5  # Names in one message, which then fits on a few lines.

_FLOATS = frozenset({"initializer_range", "norm_epsilon"})
_UNREAD_NAMES = """
    architectures model_type auto_class name_or_path transformers_version dtype torch_dtype use_bfloat16 torchscript
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id use_cache
    cache_implementation return_dict output_attentions output_hidden_states attn_implementation tokenizer_class
    chunk_size_feed_forward pretraining_tp is_decoder tie_encoder_decoder gradient_checkpointing use_flash_attn
    attention_dropout hidden_dropout classifier_dropout resid_pdrop embd_pdrop attn_pdrop summary_first_dropout
    summary_type summary_use_proj summary_activation summary_proj_to_labels n_ctx id2label label2id num_labels
    problem_type task_specific_params finetuning_task prefix max_window_layers max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_new_tokens
    unsloth_fixed unsloth_version is_llama_config transformers.js_config output_past max_sequence_length
    neftune_noise_alpha attention_probs_dropout_prob hidden_dropout_prob
"""
_IGNORED = frozenset(_UNREAD_NAMES.split())
"""Fields that do not change what a model computes, or that another field switches on."""

Values = dict[str, object]
"""Fields of our section, or of a table in the file, by name."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Fields of an architecture's ``config.json``."""

    architecture: str
    """Name of its class in transformers."""
    names: Mapping[str, str]
    """The file's names of fields of our section, where they differ."""
    defaults: Mapping[str, object]
    """Values of transformers' class for fields that a file may leave out."""
    fixed: Mapping[str, object]
    """Fields with a single value that the section can express, also their default."""
    readers: Sequence[Callable[[ConfigReader, Values], None]]
    """Functions that read the fields beyond those of all families."""


def refuse(problem: str) -> NoReturn:
    """Raise ManifestError for a model that a run's section cannot express."""
    raise ManifestError(
        f"The model's config.json cannot become a run's model section: {problem}.",
        "Choose another model: a run would compute something else than this one does.",
    )


class ConfigReader:
    """Reads fields of a ``config.json`` and remembers which."""

    def __init__(self, config: Mapping[str, object], family: ConfigFields) -> None:
        self._config = config
        self._family = family
        self._read: set[str] = set()

    def read(self, name: str, default: object = None) -> object:
        """Return a field's value; if absent, the default of the class, or else ``default``."""
        self._read.add(name)
        return self._config.get(name, self._family.defaults.get(name, default))

    def size(self, name: str) -> object:
        """Return the value of a field of our section, which may have another name in the file."""
        value = self.read(self._family.names.get(name, name))
        return as_float(value) if name in _FLOATS else value

    def finish(self) -> None:
        """Raise ManifestError if a field has a value that changes what the model computes."""
        for name, only in self._family.fixed.items():
            value = self._config.get(name, only)
            if value != only and (only or value):  # null is off
                refuse(f"{name} is {shown(value)}, and a run has only {shown(only)}")
        known = self._read | self._family.fixed.keys() | _IGNORED
        unknown = [
            shown(name)
            for name, value in self._config.items()
            if name not in known and not name.startswith("_") and value not in (None, False, [], {}, "")
        ]
        if unknown:
            more = f" and {len(unknown) - _MOST_SHOWN} more" if len(unknown) > _MOST_SHOWN else ""
            raise ManifestError(
                "The model's config.json has fields that p2ptrain does not know, and that may change what the model "
                f"computes: {', '.join(unknown[:_MOST_SHOWN])}{more}.",
                "If they change nothing, remove them from the config.json of a copy of the model.",
            )


def as_float(value: object) -> object:
    """Return an integer as a float, which JSON does not distinguish; other values unchanged."""
    try:
        return float(value) if type(value) is int else value
    except OverflowError:  # no field allows it
        return value


# --- fields that families do not share --------------------------------------------------------------------------------


def inner_width(reader: ConfigReader, values: Values) -> None:
    """Replace GPT-2's null by four times the width, as its class does."""
    if values["intermediate_size"] is None and type(width := values["hidden_size"]) is int:
        values["intermediate_size"] = 4 * width


def key_heads(reader: ConfigReader, values: Values) -> None:
    """Read the number of key and value heads; null is one for each query head."""
    shared = reader.read("num_key_value_heads")
    values["num_key_value_heads"] = values["num_attention_heads"] if shared is None else shared


def _usual_head(values: Values) -> int | None:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    return width // heads if type(width) is int and type(heads) is int and heads > 0 else None


def usual_heads(reader: ConfigReader, values: Values) -> None:
    """Check that heads have the usual width, the only one in this family's section."""
    usual = _usual_head(values)
    if (own := reader.read("head_dim")) not in (None, usual):
        refuse(f"head_dim is {shown(own)}, and in this family a run has only {usual}")


def free_heads(reader: ConfigReader, values: Values) -> None:
    """Read a head's width where the section states only an unusual one."""
    if (own := reader.read("head_dim")) not in (None, _usual_head(values)):
        values["head_dim"] = own


def own_heads(reader: ConfigReader, values: Values) -> None:
    """Read a head's width where the section states it always."""
    values["head_dim"] = reader.read("head_dim")


def positions(reader: ConfigReader, values: Values) -> None:
    """Read unscaled rotary positions."""
    values["rope_theta"] = _unscaled(_rope_table(reader), reader.read("rope_theta"), _whole(reader))
    _limit_positions(values, MAX_POSITIONS)


def scaled_positions(reader: ConfigReader, values: Values) -> None:
    """Read rotary positions with Llama 3.1's scaling or without."""
    table = _rope_table(reader)
    if table.get("rope_type", table.get("type")) != "llama3":
        return positions(reader, values)
    rest = {name: value for name, value in table.items() if name not in ("type", "rope_type")}
    values["rope_theta"] = as_float(rest.pop("rope_theta", reader.read("rope_theta")))
    _check_fraction(rest.pop("partial_rotary_factor", _whole(reader)), 1.0)
    values["rope_scaling"] = {
        name: value if name == "original_max_position_embeddings" else as_float(value) for name, value in rest.items()
    }
    return _limit_positions(values, MAX_POSITIONS)


def neox_positions(reader: ConfigReader, values: Values) -> None:
    """Read rotary positions of a part of each head."""
    theta = reader.read("rotary_emb_base", 10_000.0)
    if (other := reader.read("rope_theta", theta)) != theta:
        refuse(f"rope_theta is {shown(other)}, and rotary_emb_base {shown(theta)}")
    for name in ("partial_rotary_factor", "rotary_pct"):
        _check_fraction(reader.read(name, 0.25), 0.25)
    values["rope_theta"] = _unscaled(_rope_table(reader), theta, 0.25, only=0.25)
    _limit_positions(values, MAX_POSITIONS)


def gemma_positions(reader: ConfigReader, values: Values) -> None:
    """Read the rotary positions of sliding layers and of the others."""
    tables, scaling = _table(reader.read("rope_parameters")), _table(reader.read("rope_scaling"))
    local, other = (_table(tables.pop(kind, None)) for kind in ("sliding_attention", "full_attention"))
    if tables:
        refuse(f"rope_parameters has the field {shown(next(iter(tables)))}")
    values["rope_local_base_freq"] = _unscaled(local, reader.read("rope_local_base_freq"), 1.0)
    values["rope_theta"] = _unscaled(other | scaling, reader.read("rope_theta"), 1.0)
    _limit_positions(values, MAX_POSITIONS)


def _whole(reader: ConfigReader) -> object:
    return reader.read("partial_rotary_factor", 1.0)


def _table(value: object) -> Values:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(f"its table of rotary positions is {shown(value)}")
    return dict(value)


def _rope_table(reader: ConfigReader) -> Values:
    """Return the table of transformers 4 (``rope_scaling``) or 5 (``rope_parameters``), empty if there is none."""
    old, new = (_table(reader.read(name)) for name in ("rope_scaling", "rope_parameters"))
    return old or new  # as transformers 5


def _unscaled(table: Values, theta: object, fraction: object, only: float = 1.0) -> object:
    """Return the base wavelength of unscaled rotary positions.

    Args:
        table: ``rope_parameters``; with precedence over the next two, fields outside of it.
        theta: base wavelength.
        fraction: rotated part of each head.
        only: the part that the section can express.
    """
    rest = dict(table)
    _check_fraction(rest.pop("partial_rotary_factor", fraction), only)
    theta, old_kind = rest.pop("rope_theta", theta), rest.pop("type", "default")
    if (kind := rest.pop("rope_type", old_kind)) != "default":
        refuse(f"its rotary positions have the rope_type {shown(kind)}, which a run of this family does not have")
    if rest:
        refuse(f"its rotary positions have the field {shown(next(iter(rest)))}")
    return as_float(theta)


def _check_fraction(fraction: object, only: float) -> None:
    if fraction not in (None, only):
        refuse(f"{shown(fraction)} of each head has rotary positions, and in this family a run has only {only}")


def _limit_positions(values: Values, limit: object) -> None:
    """Cut the longest sequence to a limit, where this changes nothing for shorter ones."""
    most = values["max_position_embeddings"]
    if type(most) is int and type(limit) is int:
        values["max_position_embeddings"] = min(most, limit)


def window(reader: ConfigReader, values: Values) -> None:
    """Leave out the window of all layers, within which it has no effect."""
    _limit_positions(values, reader.read("sliding_window"))


def switched_window(reader: ConfigReader, values: Values) -> None:
    """Leave out the window of some layers, within which it has no effect; without a switch there is none."""
    window, kinds = reader.read("sliding_window"), _layer_types(reader, values) or []
    if reader.read("use_sliding_window", False) not in (None, False):
        _limit_positions(values, window)
    elif "sliding_attention" in kinds:
        refuse("layer_types has sliding_attention, and use_sliding_window is off")


def _layer_types(reader: ConfigReader, values: Values) -> list[str] | None:
    kinds = reader.read("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != values["num_hidden_layers"] or any(k not in known for k in kinds):
        refuse(f"layer_types is {shown(kinds)}, not one of {' and '.join(known)} for each layer")
    return kinds


def window_pattern(reader: ConfigReader, values: Values) -> None:
    """Read which layers attend to a window, and its size."""
    values |= {name: reader.read(name) for name in ("query_pre_attn_scalar", "sliding_window")}
    stated = reader.read("sliding_window_pattern", reader.read("_sliding_window_pattern", 6))
    kinds = _layer_types(reader, values)
    is_full = None if kinds is None else [kind == "full_attention" for kind in kinds]
    values["sliding_window_pattern"] = _interval("layer_types", is_full, stated)


def rope_pattern(reader: ConfigReader, values: Values) -> None:
    """Read which layers have no rotary positions."""
    stated, marks = reader.read("no_rope_layer_interval", 4), reader.read("no_rope_layers")
    layers, without = values["num_hidden_layers"], None
    if isinstance(marks, list) and type(layers) is int and 0 < layers <= len(marks):
        without = [mark == 0 for mark in marks[:layers]]
    elif marks is not None:
        refuse(f"no_rope_layers is {shown(marks)}, not a number for each layer")
    values["no_rope_layer_interval"] = _interval("no_rope_layers", without, stated)


def _interval(name: str, marks: list[bool] | None, stated: object) -> object:
    """Return n if every n-th layer is marked and no other; ``stated`` if there is no list, or if it fits the list."""
    if marks is None:
        return stated
    first = marks.index(True) + 1 if True in marks else len(marks) + 1
    for each in (stated, first):
        if type(each) is int and each > 0 and marks == [(index + 1) % each == 0 for index in range(len(marks))]:
            return each
    refuse(f"{name} follows no regular pattern")
