"""Published weights become a run's initial ones, bit for bit, for each family and each stage; others are refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DESCRIPTIONS, description
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from staged_rank import equal_cut
from torch import Tensor

from p2ptrain.base.errors import CorpusError, WeightsError
from p2ptrain.manifest import Decoder
from p2ptrain.train import initial_weights
from p2ptrain.train.initial_weights import BUFFERS, check_weights, load_weights, stage_targets, targets
from p2ptrain.train.model import build_module, flat_model
from p2ptrain.train.stages import stage_model

CPU = torch.device("cpu")
LLAMA = "LlamaForCausalLM"


def published(
    folder: Path, architecture: str, dtype: torch.dtype = torch.bfloat16, is_tied: bool = True, **options: Any
) -> list[Path]:
    """Write what ``save_pretrained`` writes of a model with other weights than the tests' seed; return its files."""
    build_module(described(architecture, is_tied), 7).to(dtype).save_pretrained(folder, **options)
    return sorted(folder.glob("*.safetensors"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def described(architecture: str, is_tied: bool) -> Decoder:
    return description(architecture, tie_word_embeddings=is_tied)


def loaded(architecture: str, paths: list[Path], is_tied: bool = True) -> Tensor:
    """Return the flat vector of a model that began from these files."""
    model = flat_model(described(architecture, is_tied), 1, CPU)
    load_weights(described(architecture, is_tied), paths, [digest(path) for path in paths], targets(model))
    return model.theta


def expected(architecture: str, dtype: torch.dtype, is_tied: bool = True) -> Tensor:
    """Return the flat vector of the published model, rounded to ``dtype``; its padding is zero."""
    model = flat_model(described(architecture, is_tied), 7, CPU)
    return model.theta.to(dtype).float()


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((each, torch.bfloat16) for each in DESCRIPTIONS), (LLAMA, torch.float16), (LLAMA, torch.float32)],
)
def test_a_run_begins_at_the_published_bits(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    """Check each family and type: values, the order of the vector, and its padding, which all peers must share."""
    paths = published(tmp_path, architecture, dtype)
    check_weights(description(architecture), paths)
    assert torch.equal(loaded(architecture, paths).view(torch.int32), expected(architecture, dtype).view(torch.int32))


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_a_head_of_its_own_is_read_under_the_name_that_files_use(tmp_path: Path, architecture: str) -> None:
    """Check each family without tied embeddings, as the larger published models are."""
    paths = published(tmp_path, architecture, is_tied=False)
    check_weights(described(architecture, False), paths)
    assert torch.equal(loaded(architecture, paths, False), expected(architecture, torch.bfloat16, False))
    assert not torch.equal(loaded(architecture, paths, False), flat_model(described(architecture, False), 1, CPU).theta)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_stages_begin_where_the_whole_model_begins(tmp_path: Path, architecture: str, is_tied: bool) -> None:
    """Check that the stages' vectors, end to end, are the whole one, and the last stage's copy is the embedding."""
    paths, model = published(tmp_path, architecture, is_tied=is_tied), described(architecture, is_tied)
    whole = loaded(architecture, paths, is_tied)
    stages = [stage_model(model, 1, CPU, stage) for stage in equal_cut(model.config.num_hidden_layers, 2)]
    for stage in stages:
        load_weights(model, paths, None, stage_targets(stage))
    assert torch.equal(torch.cat([stage.flat.theta for stage in stages]), whole)
    guest = stages[-1].guest
    assert (guest is not None) == is_tied
    if guest is not None:
        assert torch.equal(guest, stages[0].embedding)


def test_shards_are_one_model(tmp_path: Path) -> None:
    paths = published(tmp_path, LLAMA, max_shard_size="8KB")
    assert len(paths) > 1
    assert torch.equal(loaded(LLAMA, paths), expected(LLAMA, torch.bfloat16))
    with pytest.raises(WeightsError, match=r"lack .*model\.layers"):
        check_weights(description(LLAMA), paths[:1])


def changed(path: Path, change: Any) -> Path:
    """Rewrite a file with other tensors; ``change`` edits them by name."""
    tensors = load_file(path)
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path)
    return path


EMBEDDING = "model.embed_tokens.weight"


def test_a_tied_head_may_be_written_too_if_it_is_equal(tmp_path: Path) -> None:
    [path] = published(tmp_path, LLAMA)
    changed(path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    assert torch.equal(loaded(LLAMA, [path]), expected(LLAMA, torch.bfloat16))
    changed(path, lambda tensors: tensors["lm_head.weight"][-1, -1].add_(1))
    with pytest.raises(WeightsError, match=rf"tied weights {EMBEDDING}, lm_head\.weight differ") as caught:
        loaded(LLAMA, [path])
    assert "tie_word_embeddings to false in the model's config.json" in caught.value.remedy


def test_a_tied_embedding_may_be_written_as_the_head_alone(tmp_path: Path) -> None:
    [path] = published(tmp_path, LLAMA)
    changed(path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBEDDING)}))
    assert torch.equal(loaded(LLAMA, [path]), expected(LLAMA, torch.bfloat16))


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "GPTNeoXForCausalLM"])
def test_files_of_older_versions_are_read(tmp_path: Path, architecture: str) -> None:
    """Check names without the base model's prefix, as in gpt2's own file, and buffers beside the weights."""
    [path] = published(tmp_path, architecture)
    layer = "transformer.h.0.attn" if architecture == "GPT2LMHeadModel" else "gpt_neox.layers.0.attention"

    def age(tensors: dict[str, Tensor]) -> None:
        tensors[f"{layer}.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
        tensors[f"{layer}.masked_bias"] = torch.tensor(-1e9)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        for name in list(tensors) if architecture == "GPT2LMHeadModel" else ():
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    changed(path, age)
    assert torch.equal(loaded(architecture, [path]), expected(architecture, torch.bfloat16))


def test_a_buffers_name_is_no_weights_name() -> None:
    for architecture in DESCRIPTIONS:
        module = build_module(description(architecture), 1)
        assert [name for name, _ in module.named_parameters() if BUFFERS.search(f".{name}")] == []


def set_nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def quantize(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(16, dtype=torch.int8)


REFUSED = {
    "another shape": (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(17)}),
        r"model\.norm\.weight has the shape \[17\], but \[16\] in the described model",
    ),
    "a transposed matrix": (
        lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].T.contiguous()}),
        r"has the shape \[16, 256\], but \[256, 16\]",
    ),
    "missing": (lambda tensors: tensors.pop("model.norm.weight"), r"lack model\.norm\.weight of the described model"),
    "more layers": (
        lambda tensors: tensors.update({f"model.layers.{n}.x.weight": torch.ones(1) for n in range(2, 9)}),
        r"model\.layers\.2\.x\.weight, .* and 4 more, which the described model lacks",
    ),
    "a name twice": (
        lambda tensors: tensors.update({"norm.weight": torch.ones(16)}),
        r"have (model\.)?norm\.weight twice",
    ),
    "quantized": (quantize, r"model\.norm\.weight is I8, and only F32, F16, BF16 are loaded"),
    "not finite": (set_nan, r"numbers in model\.norm\.weight that are not finite"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_other_weights_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    [path] = published(tmp_path, LLAMA)
    changed(path, change)
    with pytest.raises(WeightsError, match=said) as caught:
        loaded(LLAMA, [path])
    assert caught.value.problem.isprintable()


def test_another_file_is_refused_before_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = published(tmp_path, LLAMA)
    model = flat_model(description(LLAMA), 1, CPU)
    before = model.theta.clone()
    with pytest.raises(WeightsError, match=f"its sha256 is {digest(path)}, not {'0' * 64}"):
        load_weights(description(LLAMA), [path], ["0" * 64], targets(model))
    assert torch.equal(model.theta, before)


@pytest.mark.parametrize("how", ["rewritten", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: Any, how: str) -> None:
    """Check changes after the digest was found right."""
    [path] = published(tmp_path, LLAMA)
    right, read = digest(path), initial_weights.PublishedWeights.read
    changes = {
        "rewritten": lambda: path.write_bytes(bytes(path.stat().st_size)),
        "replaced": lambda: (tmp_path / "new").write_bytes(b"") or (tmp_path / "new").replace(path),
        "removed": path.unlink,
    }

    def change_and_read(weights: Any, name: str, target: Tensor) -> None:
        if changes:
            changes[how]()
            changes.clear()
        read(weights, name, target)

    monkeypatch.setattr(initial_weights.PublishedWeights, "read", change_and_read)
    with pytest.raises((WeightsError, CorpusError), match="changed while it was read"):
        load_weights(description(LLAMA), [path], [right], targets(flat_model(description(LLAMA), 1, CPU)))


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_what_cannot_be_read_is_said(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(WeightsError, match=rf"The weights in {path} cannot be read"):
        check_weights(description(LLAMA), [path])


class Surprise:
    """Object whose unpickling would fail the test."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return exec, ("raise SystemExit('a pickle was loaded')",)


@pytest.mark.parametrize("form", ["zip", "legacy", "text", "cut off", "empty", "endless header"])
def test_no_other_file_is_loaded(tmp_path: Path, form: str) -> None:
    [path] = published(tmp_path, LLAMA)
    content = {
        "text": b"This is a text and no model.",
        "cut off": path.read_bytes()[:-1],
        "empty": b"",
        "endless header": b"\xff" * 8 + b"{}",
    }.get(form)
    if content is None:
        torch.save({"a": torch.zeros(2), "b": Surprise()}, path, _use_new_zipfile_serialization=form == "zip")
    else:
        path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"is not a whole safetensors file") as caught:
        check_weights(description(LLAMA), [path])
    assert "save_pretrained" in caught.value.remedy


@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for each in (content, length.to_bytes(8, "little") + content):
        path.write_bytes(each)
        with contextlib.suppress(WeightsError):
            check_weights(description(LLAMA), [path])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w"]), inner)
        ),
        max_leaves=12,
    )
)
def test_no_header_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, header: object) -> None:
    path, data = tmp_path_factory.getbasetemp() / "any.safetensors", json.dumps(header).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))
    with contextlib.suppress(WeightsError):
        check_weights(description(LLAMA), [path])
