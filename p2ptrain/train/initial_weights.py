"""Initial weights of a run that begins from published ones: checked against the run's model, then copied into it.

``PublishedWeights.check`` reads headers alone and compares names and shapes with those of the run's module; only then
is a tensor read, by ``init`` already. Peers copy the same bits: every type that is accepted converts to fp32 exactly.
safetensors parses the files, and nothing in them is executed.

Dimension letters: P parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2ptrain.base import files
from p2ptrain.base.errors import WeightsError
from p2ptrain.base.text import one_line
from p2ptrain.data.hub_weights import OTHER_MODEL
from p2ptrain.data.sources import unchanged
from p2ptrain.data.weight_files import local_weights
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.train.model import FILE_NAMES, shape_module

if TYPE_CHECKING:
    from p2ptrain.data.file_store import FileStore
    from p2ptrain.manifest import Decoder, Manifest
    from p2ptrain.train.model import FlatModel
    from p2ptrain.train.stages import StageModel

TYPES = ("F32", "F16", "BF16")
"""Types of weights that convert to fp32 exactly."""

BUFFERS = re.compile(r"\.(?:rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias|attention\.bias|attention\.masked_bias)$")
"""Tensors beside the weights in files that older versions of transformers wrote: rotary frequencies and causal masks,
which the module computes itself."""

MOST_NAMED = 3
"""Tensors that a message names."""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Names and shapes of a model's weights."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter, by name; tied ones once."""
    aliases: Mapping[str, str]
    """Further names of tied parameters, each with the first one."""
    prefix: str
    """Beginning of names inside the base model, which files of a base model leave out."""
    renamed: Mapping[str, str]
    """The model's name for each parameter that files name otherwise."""

    @classmethod
    def of(cls, description: Decoder) -> ModelOutline:
        """Build the module without memory for its weights, and return its outline."""
        module = shape_module(description)
        layout = FlatLayout.of(module)
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        every = module.named_parameters(remove_duplicate=False)
        aliases = {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        renamed = {stored: name for name, stored in FILE_NAMES.get(module.config.model_type, {}).items()}
        return cls(shapes, aliases, f"{module.base_model_prefix}.", renamed)

    def own_name(self, name: str) -> str | None:
        """Return the model's name for a tensor of a file; None if it is none of the model's."""
        names = (self.renamed.get(name, name), self.prefix + name)
        known = (each for each in names if each in self.shapes or each in self.aliases)
        return next(known, None)


class PublishedWeights:
    """Tensors of files that fit a model.

    Args:
        places: the file and its name there of each tensor, by the model's name.
    """

    def __init__(self, opened: Mapping[Path, Any], places: Mapping[str, tuple[Path, str]]) -> None:
        self._opened = opened
        self._places = places
        self._beside: dict[str, list[str]] = {}
        """Aliases in the files, by the parameter's name."""

    @classmethod
    def check(cls, outline: ModelOutline, opened: Mapping[Path, Any]) -> PublishedWeights:
        """Compare the headers of all files, opened by ``_opened``, with the model. Raises WeightsError."""
        found: dict[str, tuple[Path, str]] = {}
        strange: list[str] = []
        for path, file in opened.items():
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                own = outline.own_name(name)
                if own is None:
                    strange += [] if BUFFERS.search(f".{name}") else [name]
                    continue
                if own in found:
                    raise WeightsError(
                        f"The weights in {path} have {_named([name])} twice.",
                        "Name the files of one model alone. If the run is not yours, ask its author.",
                    )
                _check_tensor(name, file.get_slice(name), outline.shapes[outline.aliases.get(own, own)], path)
                found[own] = path, name
        weights = cls(opened, found)
        for alias, first in outline.aliases.items():
            if alias in found and first not in found:
                found[first] = found.pop(alias)
            elif alias in found:
                weights._beside.setdefault(first, []).append(alias)
        where = _where(list(opened))
        if missing := [name for name in outline.shapes if name not in found]:
            raise WeightsError(f"The weights in {where} lack {_named(missing)} of the described model.", OTHER_MODEL)
        if strange:
            raise WeightsError(
                f"The weights in {where} have {_named(strange)}, which the described model lacks.", OTHER_MODEL
            )
        return weights

    def read(
        self,
        name: str,
        target: Tensor | None = None,  # fp32, of the parameter's shape, on any device; None: only check it
    ) -> None:
        """Copy a parameter. Raises OSError, WeightsError if it is not finite or a tied one differs."""
        path, tensor = self._places[name][0], self._tensor(name)
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(
                f"{path} holds numbers in {_named([name])} that are not finite.",
                "Get the file again, or begin from another model: training cannot go on from such weights.",
            )
        beside = self._beside.get(name, [])
        if not all(torch.equal(tensor, self._tensor(other)) for other in beside):
            raise WeightsError(
                f"In {path} the tied weights {_named([name, *beside])} differ.",
                "Set tie_word_embeddings to false in the model's config.json, and begin another run from it. If the "
                "run is not yours, ask its author.",
            )
        if target is not None:
            target.detach().copy_(tensor)

    def _tensor(self, name: str) -> Tensor:
        """Return a stored tensor, fp32 on the host."""
        path, stored = self._places[name]
        found: Tensor = self._opened[path].get_tensor(stored)
        return found.float()


def check_weights(description: Decoder, paths: Sequence[Path]) -> None:
    """Raise WeightsError unless the files hold exactly the weights of the model, all of them finite."""
    outline = ModelOutline.of(description)
    with _opened(paths) as opened:
        weights = PublishedWeights.check(outline, opened)
        for name in outline.shapes:
            weights.read(name)


def load_initial(
    manifest: Manifest, store: FileStore, place: Path | None, targets: Iterable[tuple[str, Tensor]]
) -> None:
    """Replace random weights by those that the run names, if it names any. Raises UserError.

    ``store``, ``place``: as for ``local_weights``; ``targets``: as for ``load_weights``.
    """
    if (init := manifest.model.init) is not None:
        digests = init.sha256 if init.kind == "file" else None
        load_weights(manifest.model, local_weights(manifest, store, place), digests, targets)


def load_weights(
    description: Decoder,
    paths: Sequence[Path],
    digests: Sequence[str] | None,  # SHA-256 of each file; None: checked when the hub sent them
    targets: Iterable[tuple[str, Tensor]],  # parameters by name, fp32, of which a stage has a part
) -> None:
    """Check the files' digests and headers, then copy parameters. Raises WeightsError, also if a file changes."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(unchanged(path))
        weights = PublishedWeights.check(ModelOutline.of(description), stack.enter_context(_opened(paths)))
        for path, digest in zip(paths, digests or (), strict=bool(digests)):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise WeightsError(
                    f"{path} is not the file that the run names: its sha256 is {found}, not {digest}.",
                    "Get the file that this run was started with, unchanged, and pass it with --weights PATH.",
                )
        for name, target in targets:
            weights.read(name, target)


def targets(model: FlatModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a whole model for ``load_weights``."""
    yield from model.layout.views(model.theta).items()


def stage_targets(model: StageModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a stage for ``load_weights``, and its copy of the tied embedding, the first of all."""
    yield from targets(model.flat)
    if model.guest is not None:
        yield model.whole.names[0], model.guest


@contextlib.contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[dict[Path, Any]]:
    """Open files by safetensors, and convert its errors and the system's in the context to WeightsError."""
    path = _where(paths)
    try:
        with contextlib.ExitStack() as stack:
            opened = {}
            for path in paths:
                with path.open("rb"):  # a folder, or no right to read it, which safetensors does not say
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            path = _where(paths)
            yield opened
    except OSError as error:
        raise WeightsError(
            f"The weights in {error.filename or path} cannot be read: {files.cause(error)}.", files.remedy(error, "")
        ) from error
    except SafetensorError as error:
        raise WeightsError(
            f"{path} is not a whole safetensors file ({one_line(str(error), 80)}).",
            "Get the whole file from where it was published. A pickle is never loaded: let transformers' "
            "save_pretrained write the weights as safetensors.",
        ) from error


def _where(paths: Sequence[Path]) -> Path:
    return paths[0] if len(paths) == 1 else paths[0].parent


def _check_tensor(name: str, tensor: Any, wanted: tuple[int, ...], path: Path) -> None:
    if tuple(tensor.get_shape()) != wanted:
        raise WeightsError(
            f"In {path} {_named([name])} has the shape {tensor.get_shape()}, but {list(wanted)} in the described "
            "model.",
            OTHER_MODEL,
        )
    if tensor.get_dtype() not in TYPES:
        raise WeightsError(
            f"In {path} {_named([name])} is {tensor.get_dtype()}, and only {', '.join(TYPES)} are loaded.",
            "Use the model's unquantized weights.",
        )


def _named(names: Sequence[str]) -> str:
    """List a few names of a stranger's tensors, and count the others."""
    more = len(names) - MOST_NAMED
    shown = ", ".join(one_line(name, 80) for name in names[:MOST_NAMED])
    return shown if more <= 0 else f"{shown} and {more:,} more"
