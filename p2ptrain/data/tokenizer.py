"""Conversion between text and token ids: plain bytes, or a ``tokenizer.json`` from the hub or a local file.

Only the ``tokenizers`` library reads a foreign tokenizer: its format is data and contains no code.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.sources import check_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HubTokenizer

    from p2ptrain.manifest import Tokenizer as TokenizerSpec

MOST_TOKENIZER_BYTES = 64 << 20
"""Maximum size of a tokenizer.json. The largest in wide use (256 thousand tokens) take 20 to 35 MB."""

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Tokens that separate documents, in order of preference. A tokenizer.json does not say which one it uses."""


class Tokenizer(Protocol):
    """Tokenizer interface of the data pipeline and of text generation."""

    @property
    def vocabulary_size(self) -> int:
        """Exclusive upper bound of the ids."""

    @property
    def separator(self) -> int | None:
        """Id that separates documents; None if there is none."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one array of ids per text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; invalid text becomes replacement characters."""

    def save(self, directory: Path) -> None:
        """Write files that ``transformers.AutoTokenizer.from_pretrained(directory)`` loads. Raises OSError."""


class ByteTokenizer:
    """Tokenizer with 256 ids, one per byte of UTF-8. Byte 0, which text does not contain, separates documents."""

    vocabulary_size = 256
    separator = 0

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """Save as a byte-level BPE without merges: its alphabet names every byte, so ids and bytes stay equal."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        _save(tokenizer, directory, separator=None)


class JsonTokenizer:
    """Tokenizer of the ``tokenizers`` library."""

    def __init__(self, tokenizer: HubTokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocabulary_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        ids = map(tokenizer.token_to_id, SEPARATORS)
        self.separator = next((identifier for identifier in ids if identifier is not None), None)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))

    def save(self, directory: Path) -> None:
        _save(self._tokenizer, directory, separator=self.separator)


def load_tokenizer(
    spec: TokenizerSpec,  # the manifest's section
    tokenizer_file: Path | None = None,  # the owner's file, for kind "file"
) -> Tokenizer:
    """Load the run's tokenizer. Raises CorpusError if it is not available or not the one that the run names."""
    if spec.kind == "bytes":
        return ByteTokenizer()
    if spec.kind == "hub":
        return JsonTokenizer(_parse(_download(spec.name, spec.revision)))
    if tokenizer_file is None:
        raise CorpusError(
            f"This run's tokenizer is a file with sha256 {spec.sha256}, but no file was given.",
            "Get that tokenizer.json from the run's author and pass it with --tokenizer FILE.",
        )
    check_digest(tokenizer_file, spec.sha256, "tokenizer")
    return JsonTokenizer(_parse(tokenizer_file))


def _download(name: str, revision: str) -> Path:
    """Return tokenizer.json of a hub model at a revision, from the hub's local cache if it is there."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "tokenizer.json", revision=revision))
    except Exception as error:  # also errors of the HTTP library that the hub's client uses
        raise CorpusError(
            f"The tokenizer {name} at revision {revision} could not be downloaded from the Hugging Face hub ({error}).",
            "Check the internet connection (and HF_ENDPOINT, HF_HUB_OFFLINE if set), then start again.",
        ) from error


def _parse(path: Path) -> HubTokenizer:
    from tokenizers import Tokenizer

    try:
        if path.stat().st_size > MOST_TOKENIZER_BYTES:
            raise ValueError(f"larger than {MOST_TOKENIZER_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        outline = json.loads(text)
        if not (isinstance(outline, dict) and isinstance(outline.get("model"), dict) and outline["model"].get("vocab")):
            raise ValueError("model.vocab is missing")
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific for a malformed file
        raise CorpusError(
            f"{path} is not a tokenizer ({error}).",
            "Name a tokenizer.json in the format of the tokenizers library.",
        ) from error


def _save(tokenizer: HubTokenizer, directory: Path, separator: int | None) -> None:
    """Write the tokenizer's files. Raises OSError, which the library's own ``save`` does not."""
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if separator is not None:
        config["eos_token"] = tokenizer.id_to_token(separator)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _byte_letters() -> list[str]:
    """Return GPT-2's stand-in for every byte: the byte itself if it prints, else the next free letter from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = itertools.count(256)
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]
