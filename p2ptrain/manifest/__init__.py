"""The manifest: the immutable description of a run that all its peers share.

The author of a run edits ``manifest.toml`` and signs it. The SHA-256 of its canonical bytes is the RunId, and the join
link carries it. Any peer may serve the bytes, because a joining peer checks them against the link. Any edit makes
another run. This package does not build models, open corpora or import torch.

A manifest is **untrusted input**. Models are allow-listed, and their size is computed from the shapes and limited.
Texts and tokenizers ship with the package, are pinned to a commit on the hub, or are named by a digest whose file the
owner chooses. There are no paths and no code, and every string must match a pattern or a list.

===============  ========================================================================
section          string types and strictness that all sections share
model            the ``model`` section: architectures, limits, ``parameter_count``
sources          the ``tokenizer`` and ``corpus`` sections
schema           the other sections and the rules between fields
faults           readable messages for schema errors
document         TOML with comments, canonical JSON, RunId, differences
signing          ``SignedManifest``: the form that the network carries
presets          demo, llama-15m, llama-135m
directory        a run's directory: create, sign, load
link             ``JoinLink``: one token to copy
===============  ========================================================================
"""

from p2ptrain.base.codec_names import FRAGMENT_ALIGNMENT
from p2ptrain.framing import MAX_MANIFEST_BYTES
from p2ptrain.manifest.directory import (
    KEY_FILE,
    MANIFEST_FILE,
    SETTINGS_FILE,
    SIGNED_FILE,
    Signing,
    create_run,
    load_run,
    read_key,
    sign_run,
)
from p2ptrain.manifest.document import (
    canonical_bytes,
    differences,
    parse_toml,
    render_toml,
    run_id,
    with_changes,
)
from p2ptrain.manifest.link import JoinLink, check_address, is_peer_id
from p2ptrain.manifest.model import MAX_PARAMETERS, Decoder, DecoderConfig, parameter_count
from p2ptrain.manifest.presets import PRESETS, preset
from p2ptrain.manifest.schema import (
    AdmissionSection,
    CodecSection,
    Manifest,
    OuterSection,
    RunSection,
    SwarmSection,
    TrainingSection,
)
from p2ptrain.manifest.signing import SignedManifest, genuine_run, public_key_of, sign
from p2ptrain.manifest.sources import (
    BuiltinCorpus,
    BytesTokenizer,
    Corpus,
    FileCorpus,
    FileTokenizer,
    HubCorpus,
    HubTokenizer,
    Tokenizer,
)

__all__ = [
    "FRAGMENT_ALIGNMENT",
    "KEY_FILE",
    "MANIFEST_FILE",
    "MAX_MANIFEST_BYTES",
    "MAX_PARAMETERS",
    "PRESETS",
    "SETTINGS_FILE",
    "SIGNED_FILE",
    "AdmissionSection",
    "BuiltinCorpus",
    "BytesTokenizer",
    "CodecSection",
    "Corpus",
    "Decoder",
    "DecoderConfig",
    "FileCorpus",
    "FileTokenizer",
    "HubCorpus",
    "HubTokenizer",
    "JoinLink",
    "Manifest",
    "OuterSection",
    "RunSection",
    "SignedManifest",
    "Signing",
    "SwarmSection",
    "Tokenizer",
    "TrainingSection",
    "canonical_bytes",
    "check_address",
    "create_run",
    "differences",
    "genuine_run",
    "is_peer_id",
    "load_run",
    "parameter_count",
    "parse_toml",
    "preset",
    "public_key_of",
    "read_key",
    "render_toml",
    "run_id",
    "sign",
    "sign_run",
    "with_changes",
]
