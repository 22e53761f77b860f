"""The manifest: the one frozen description that all peers of a run share.

A run's author edits ``manifest.toml`` and signs it. From then on the run is its canonical bytes: their SHA-256 is the
RunId, a join link carries that digest, and any peer may serve the bytes, since a joiner checks them against the link.
Editing anything makes another run. Nothing here builds a model, opens a corpus or imports torch.

A manifest was **written by a stranger**: models are allow-listed and their size is computed and capped from the shapes
alone; texts and tokenizers are shipped, pinned to a commit on the hub, or a digest whose file the owner points to;
there are no paths, no code, and no string that is not matched against a pattern or a list.

===============  ========================================================================
section          the kinds of string and the strictness all sections share
model            the ``model`` section: architectures, caps, ``parameter_count``
sources          the ``tokenizer`` and ``corpus`` sections
schema           the other sections and the rules between fields
faults           schema errors in the owner's words
document         TOML with comments, canonical JSON, RunId, differences
signing          ``SignedManifest``: what the network carries
presets          demo, llama-15m, llama-135m
directory        a run's directory: create, sign, load
link             ``JoinLink``: one token to copy
===============  ========================================================================
"""

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
    MAX_MANIFEST_BYTES,
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
    FRAGMENT_ALIGNMENT,
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
