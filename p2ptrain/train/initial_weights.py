"""Initial weights of a run that begins from published ones: checked against the run's model, then copied into it.

``PublishedWeights.check`` reads headers alone and compares names and shapes with those of the run's module; only then
is a tensor read, by ``init`` already. Peers copy the same bits: every type that is accepted converts to fp32 exactly.
Nothing in the files is executed.

Dimension letters: P parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.base import files
from p2ptrain.base.errors import OtherModelError, WeightsError
from p2ptrain.base.text import one_line
from p2ptrain.data.hub_weights import OTHER_MODEL
from p2ptrain.data.safetensors_header import ELEMENT_BYTES, TensorPlace, read_header
from p2ptrain.data.sources import unchanged
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.train.model import FILE_NAMES, shape_module

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder
    from p2ptrain.train.model import FlatModel
    from p2ptrain.train.stages import StageModel

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights that convert to fp32 exactly."""

PIECE_ELEMENTS = 1 << 22
"""Elements that are read at once: 16 MB in fp32."""

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


@dataclass(frozen=True, slots=True)
class _Stored:
    """Tensor in one of the files."""

    file: int
    place: TensorPlace


class PublishedWeights:
    """Open safetensors files that together hold the weights of one model. ``check`` makes one.

    Args:
        tensors: every parameter, and of aliases those that a file has beside the parameter.
    """

    def __init__(self, paths: Sequence[Path], opened: Sequence[BufferedReader], tensors: Mapping[str, _Stored]) -> None:
        self._paths = paths
        self._files = opened
        self._tensors = tensors
        self._beside: dict[str, list[str]] = {}
        """Aliases in the files, by the parameter's name."""

    @classmethod
    def check(cls, outline: ModelOutline, paths: Sequence[Path], opened: Sequence[BufferedReader]) -> PublishedWeights:
        """Compare the headers of all files with the model. Raises WeightsError and OSError."""
        found: dict[str, _Stored] = {}
        strange: list[str] = []
        for number, path in enumerate(paths):
            for name, place in read_header(path).items():
                own = outline.own_name(name)
                if own is None:
                    strange += [] if BUFFERS.search(f".{name}") else [name]
                    continue
                if own in found:
                    raise WeightsError(
                        f"The weights in {path} have {_named([name])} twice.",
                        "Name the files of one model alone. If the run is not yours, ask its author.",
                    )
                _check_place(name, place, outline.shapes[outline.aliases.get(own, own)], path)
                found[own] = _Stored(number, place)
        weights = cls(paths, opened, found)
        for alias, first in outline.aliases.items():
            if alias in found and first not in found:
                found[first] = found.pop(alias)
            elif alias in found:
                weights._beside.setdefault(first, []).append(alias)
        where = paths[0] if len(paths) == 1 else paths[0].parent
        if missing := [name for name in outline.shapes if name not in found]:
            raise OtherModelError(f"The weights in {where} lack {_named(missing)} of the described model.", OTHER_MODEL)
        if strange:
            raise OtherModelError(
                f"The weights in {where} have {_named(strange)}, which the described model lacks.", OTHER_MODEL
            )
        return weights

    def read(
        self,
        name: str,
        target: Tensor | None = None,  # fp32, of the parameter's shape, on any device; None: only check it
    ) -> None:
        """Copy a parameter, piece by piece. Raises OSError, WeightsError if it is not finite or a tied one differs."""
        flat, begin = None if target is None else target.detach().view(-1), 0
        readers = [self._pieces(each) for each in (name, *self._beside.get(name, ()))]
        for piece, *others in zip(*readers, strict=True):
            if not bool(torch.isfinite(piece).all()):
                raise WeightsError(
                    f"{self._path(name)} holds numbers in {_named([name])} that are not finite.",
                    "Get the file again, or begin from another model: training cannot go on from such weights.",
                )
            if not all(torch.equal(piece, other) for other in others):
                raise WeightsError(
                    f"In {self._path(name)} the tied weights {_named([name, *self._beside[name]])} differ.",
                    "Set tie_word_embeddings to false in the model's config.json, and begin another run from it. If "
                    "the run is not yours, ask its author.",
                )
            if flat is not None:
                flat[begin : begin + len(piece)].copy_(piece)
            begin += len(piece)

    def _path(self, name: str) -> Path:
        return self._paths[self._tensors[name].file]

    def _pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a stored tensor in pieces, fp32 [k] on the host."""
        stored = self._tensors[name]
        file, place = self._files[stored.file], stored.place
        width, kind = ELEMENT_BYTES[place.dtype], TYPES[place.dtype]
        for begin in range(0, place.elements, PIECE_ELEMENTS):
            data = bytearray(width * min(PIECE_ELEMENTS, place.elements - begin))
            file.seek(place.begin + width * begin)
            if file.readinto(data) != len(data):
                raise _changed(self._path(name))
            yield torch.frombuffer(data, dtype=kind).float()


def check_weights(description: Decoder, paths: Sequence[Path]) -> None:
    """Raise WeightsError unless the files hold exactly the weights of the model, all of them finite."""
    outline = ModelOutline.of(description)
    with _opened(paths) as opened:
        weights = PublishedWeights.check(outline, paths, opened)
        for name in outline.shapes:
            weights.read(name)


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
        opened = stack.enter_context(_opened(paths))
        weights = PublishedWeights.check(ModelOutline.of(description), paths, opened)
        for path, file, digest in zip(paths, opened, digests or (), strict=bool(digests)):
            file.seek(0)
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
def _opened(paths: Sequence[Path]) -> Iterator[list[BufferedReader]]:
    """Open files, and convert the system's errors in the context to WeightsError."""
    try:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(path.open("rb")) for path in paths]
    except OSError as error:
        where = error.filename or (paths[0] if len(paths) == 1 else paths[0].parent)
        raise WeightsError(
            f"The weights in {where} cannot be read: {files.cause(error)}.", files.remedy(error, "")
        ) from error


def _check_place(name: str, place: TensorPlace, wanted: tuple[int, ...], path: Path) -> None:
    if place.shape != wanted:
        raise OtherModelError(
            f"In {path} {_named([name])} has the shape {list(place.shape)}, but {list(wanted)} in the described model.",
            OTHER_MODEL,
        )
    if place.dtype not in TYPES:
        raise WeightsError(
            f"In {path} {_named([name])} is {place.dtype}, and only {', '.join(TYPES)} are loaded.",
            "Use the model's unquantized weights.",
        )


def _named(names: Sequence[str]) -> str:
    """List a few names of a stranger's tensors, and count the others."""
    more = len(names) - MOST_NAMED
    shown = ", ".join(one_line(name, 80) for name in names[:MOST_NAMED])
    return shown if more <= 0 else f"{shown} and {more:,} more"


def _changed(path: Path) -> WeightsError:
    return WeightsError(f"{path} changed while it was read.", "Start again when no program writes it any more.")
