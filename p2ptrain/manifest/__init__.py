"""The manifest: the immutable description of a run that all its peers share.

The author of a run edits ``manifest.toml`` and signs it. The SHA-256 of its canonical bytes is the RunId, and the join
link carries it. Any peer may serve the bytes, because a joining peer checks them against the link. Any edit makes
another run. This package does not build models, open corpora or import torch.

A manifest is **untrusted input**. Models are allow-listed, and their size is computed from the shapes and limited.
Texts and tokenizers ship with the package or are named by digest. There are no paths to read and no code, and every
string must match a pattern or a list.
"""

from p2ptrain.manifest.decoder import Decoder
from p2ptrain.manifest.directory import (
    KEY_FILE,
    MANIFEST_FILE,
    SETTINGS_FILE,
    SIGNED_FILE,
    check_free,
    create_run,
    load_run,
    name_change,
    read_key,
    read_run,
    sign_run,
)
from p2ptrain.manifest.document import parse_toml, render_toml, with_changes
from p2ptrain.manifest.fitting import advice
from p2ptrain.manifest.link import JoinLink
from p2ptrain.manifest.model import parameter_count
from p2ptrain.manifest.presets import PRESETS, preset
from p2ptrain.manifest.schema import CodecSection, Manifest, OuterSection, SwarmSection, TrainingSection
from p2ptrain.manifest.signing import SignedManifest, genuine_run
from p2ptrain.manifest.sources import Corpus, Tokenizer

__all__ = [
    "KEY_FILE",
    "MANIFEST_FILE",
    "PRESETS",
    "SETTINGS_FILE",
    "SIGNED_FILE",
    "CodecSection",
    "Corpus",
    "Decoder",
    "JoinLink",
    "Manifest",
    "OuterSection",
    "SignedManifest",
    "SwarmSection",
    "Tokenizer",
    "TrainingSection",
    "advice",
    "check_free",
    "create_run",
    "genuine_run",
    "load_run",
    "name_change",
    "parameter_count",
    "parse_toml",
    "preset",
    "read_key",
    "read_run",
    "render_toml",
    "sign_run",
    "with_changes",
]
