"""Names of the files that hold a published model's weights, one or several shards with an index."""

from __future__ import annotations

import json
import re

from p2ptrain.manifest.initial_weights import MAX_WEIGHT_FILES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names that transformers gives to weights in one file, and to the list of shards."""

MAX_INDEX_BYTES = 4 << 20
"""Maximum size of an index: a line of 100 bytes for each tensor of the largest model that a manifest allows."""

SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.safetensors")
"""Name of a shard in an index, which is a stranger's: no path."""


def shard_names(index: bytes) -> list[str]:
    """Return the names of the files that an index lists, each once, in order. Raises ValueError."""
    try:
        listed = json.loads(index)["weight_map"].values()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("it lists no shards") from None
    names = sorted({name for name in listed if isinstance(name, str) and SHARD.fullmatch(name)})
    if len(names) != len({str(name) for name in listed}) or not 0 < len(names) <= MAX_WEIGHT_FILES:
        raise ValueError(f"it must list 1 to {MAX_WEIGHT_FILES} safetensors files of its own folder")
    return names
