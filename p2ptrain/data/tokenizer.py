"""Conversion between text and token ids: plain bytes, or a ``tokenizer.json``.

Only the ``tokenizers`` library reads a foreign tokenizer: its format is data and contains no code. Beside a vocabulary
the file holds settings that cut, pad, extend or randomize what it encodes. ``JsonTokenizer`` turns these off, so that
training, held-out evaluation, text generation and export encode a text alike; docs/DATA.md lists every decision.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line, printable
from p2ptrain.data.sources import check_digest, unchanged

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HubTokenizer

    from p2ptrain.manifest import Manifest
    from p2ptrain.manifest import Tokenizer as TokenizerSpec

MOST_TOKENIZER_BYTES = 64 << 20
"""Maximum size of a tokenizer.json. The largest in wide use (256 thousand tokens) take 20 to 35 MB."""

MOST_REPLACEMENT_GROWTH = 8
"""Maximum factor by which all Replace normalizers, or those of the decoder, may lengthen a text. Usual files have at
most three, of factor 2. Guess: measure the factors of the hub's most downloaded tokenizers."""

CHARSMAP_LENGTH = 18
"""Letters of one character in a normalizer's table that do not count as growth: those of U+FDFA in NFKC."""

MOST_TOKEN_CHARS = 1_024
"""Maximum length of a token, since the unknown one may stand for each letter that is decoded. Guess: measure the
longest tokens of the hub's most downloaded tokenizers."""

MOST_PREFIX_IDS = 4
"""Maximum number of tokens before every text: files in wide use have one."""

SEPARATORS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|begin_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[SEP]",
)
"""Tokens that separate documents, in order of preference. A tokenizer.json does not say which one it uses. Special
tokens come first: in some vocabularies "</s>" is an ordinary token, the HTML tag."""

REPLACEMENT = "\ufffd"
"""Replacement character of Unicode, for what a text must not contain."""

SPECIAL_MARK, BORDER_MARK = "\U000f0000", "\U000f0001"
"""Characters of a private plane: within text that is not to be read as a special token, and where a token ends."""

UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
"""Byte values that occur in UTF-8 (RFC 3629, section 3)."""


class ByteTokenizer:
    """Tokenizer with 256 ids, one per byte of UTF-8. Byte 0 separates documents; in a text U+FFFD takes its place.

    It has the attributes and methods of ``JsonTokenizer`` that do without a file.
    """

    vocabulary_size = 256
    separator = 0
    unknown = None
    prefix = ()
    separator_text = bos_text = ""
    replaced = "\0"
    special_tokens = unused = ()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = (text.replace("\0", REPLACEMENT).encode("utf-8", errors="replace") for text in texts)
        return [np.frombuffer(each, dtype=np.uint8) for each in encoded]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        starts = []
        for text in texts:
            points = np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype=np.uint32)
            points = np.where(points == 0, ord(REPLACEMENT), points)
            lengths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
            lengths[(points == ord(SPECIAL_MARK)) | (points == ord(BORDER_MARK))] = 0
            starts.append(np.repeat(np.arange(len(points)), lengths))
        plain = [text.replace(SPECIAL_MARK, "").replace(BORDER_MARK, "") for text in texts]
        return list(zip(self.encode_batch(plain), starts, strict=True))

    def byte_count(self, ids: Sequence[int]) -> int:
        return len(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def shown(self, ids: Sequence[int]) -> str:
        return self.decode(ids).replace("\0", "\N{SYMBOL FOR NULL}")

    def save(self, directory: Path) -> None:
        """Save as a byte-level BPE without merges: its alphabet names every byte, so ids and bytes stay equal."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.normalizer = normalizers.Replace("\0", REPLACEMENT)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        _save(tokenizer, directory)


class JsonTokenizer:
    """Tokenizer of the ``tokenizers`` library, without the settings of its file that are not about the vocabulary.

    Args:
        tokenizer: is changed: no truncation, padding, post-processor or dropout; the literal text of a special token is
            ordinary text.
        unknown: id of the unknown token; None if the vocabulary covers every text.
        first: ids that the file's post-processor puts before every text.
        has_prefix: whether documents begin with them, as the model that was published with the tokenizer expects.
        separator: id that ends documents; None: the usual one of the vocabulary, if it has one.
    """

    replaced = ""
    """Character of a text that becomes U+FFFD; empty if there is none."""

    def __init__(
        self,
        tokenizer: HubTokenizer,
        unknown: int | None = None,
        first: Sequence[int] = (),
        has_prefix: bool = False,
        separator: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.unknown = unknown
        self.prefix = tuple(first) if has_prefix else ()
        self.bos_text = str(tokenizer.id_to_token(first[0])) if first else ""
        self.separator = _separator(tokenizer, separator)
        self.vocabulary_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        """Exclusive upper bound of the ids."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.post_processor = None
        dropout = getattr(tokenizer.model, "dropout", None)
        self.unused: Sequence[str]
        """Sentences, without their full stops, on what the file wants and training does not do."""
        self.unused = [f"the tokenizer's BPE dropout of {dropout:g} is not used"] if dropout else []
        if dropout is not None:
            tokenizer.model.dropout = None
        tokenizer.encode_special_tokens = True
        self._marked: HubTokenizer | None = None
        """Copy for which special tokens in a text are special; made when it is needed."""
        _keep_special_text_apart(tokenizer)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one array of ids per text, equal for equal texts. Raises CorpusError if the tokenizer is faulty."""
        with _faults("The tokenizer cannot encode the text"):
            encodings = self._tokenizer.encode_batch_fast(_encodable(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    @property
    def separator_text(self) -> str:
        """Text of the separator, as exported files name it; empty if there is none."""
        return "" if self.separator is None else self.token(self.separator)

    def token(self, token_id: int) -> str:
        """Return the text of a token; empty if there is none."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def is_mark(self, token_id: int) -> bool:
        """Return whether a token stands for no text: a special or added one, or byte 0."""
        token = self.token(token_id)
        added = token_id in self._tokenizer.get_added_tokens_decoder()
        return bool(token) and (added or token in SEPARATORS or self.decode([token_id]) in ("", "\0"))

    @property
    def special_tokens(self) -> Sequence[str]:
        """Texts that ``encode_marked`` reads as one token each, wherever they are."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special and token.content]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids, and the character where each begins, of texts in which special tokens are special.

        ``SPECIAL_MARK`` and ``BORDER_MARK`` count as characters, act as they say, and have no ids.

        Raises CorpusError if the tokenizer is faulty.
        """
        if self._marked is None:
            self._marked = _marked_copy(self._tokenizer)
        with _faults("The tokenizer cannot encode the text"):
            encodings = self._marked.encode_batch(_encodable(texts), add_special_tokens=False)
        return [
            (np.asarray(each.ids, dtype=np.uint32), np.asarray([start for start, _ in each.offsets], dtype=np.int64))
            for each in encodings
        ]

    def byte_count(self, ids: Sequence[int]) -> int:
        """Return the bytes of the text of some ids as UTF-8. Special tokens have none."""
        return len(self.decode(ids).encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; invalid text becomes replacement characters."""
        return self._tokenizer.decode(list(ids))

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of some ids in which separators and other special tokens are seen."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write files that ``transformers.AutoTokenizer.from_pretrained(directory)`` loads. Raises OSError."""
        _save(self._tokenizer, directory, self.separator_text, self.bos_text, self.prefix)


Tokenizer = ByteTokenizer | JsonTokenizer


def tokenizer_of(
    manifest: Manifest,
    tokenizer_file: Path | None = None,  # the owner's file, for kind "file"
) -> Tokenizer:
    """Load a run's tokenizer: a run that continues a published model begins documents as the model's tokenizer does.

    Raises CorpusError, as ``load_tokenizer``.
    """
    return load_tokenizer(manifest.tokenizer, tokenizer_file, has_prefix=manifest.model.init is not None)


def load_tokenizer(
    spec: TokenizerSpec,  # the manifest's section
    tokenizer_file: Path | None = None,  # the owner's file, for kind "file"
    has_prefix: bool = False,  # whether documents begin with what the file's post-processor puts before a text
) -> Tokenizer:
    """Load a tokenizer. Raises CorpusError if it is unavailable, unusable or not the one that the manifest names."""
    if spec.kind == "bytes":
        return ByteTokenizer()
    if tokenizer_file is None:
        raise CorpusError(
            f"This run's tokenizer is a file with sha256 {spec.sha256}, which is not here.",
            "Start a peer of the run, which fetches it.",
        )
    with unchanged(tokenizer_file):
        check_digest(tokenizer_file, spec.sha256, "tokenizer")
        return _parse(tokenizer_file, has_prefix, spec.separator)


def _parse(path: Path, has_prefix: bool, separator: int | None = None) -> JsonTokenizer:
    from tokenizers import Tokenizer

    with _faults(f"{path} is not a tokenizer"):
        if path.stat().st_size > MOST_TOKENIZER_BYTES:
            raise ValueError(f"larger than {MOST_TOKENIZER_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        outline = json.loads(text)
        if not (isinstance(outline, dict) and isinstance(outline.get("model"), dict) and outline["model"].get("vocab")):
            raise ValueError("model.vocab is missing")
        for part in ("normalizer", "decoder"):
            if _replacement_growth(outline.get(part)) > MOST_REPLACEMENT_GROWTH:
                raise ValueError(f"its {part} may lengthen a text more than {MOST_REPLACEMENT_GROWTH} times")
        tokenizer = Tokenizer.from_str(text)
        longest = max(map(len, tokenizer.get_vocab()), default=0)
        if longest > MOST_TOKEN_CHARS:
            raise ValueError(f"it has a token of {longest:,} characters, and at most {MOST_TOKEN_CHARS:,} are read")
        _check_added_ids(tokenizer, outline)
        unknown = _unknown(tokenizer, outline, path)
        made = JsonTokenizer(tokenizer, unknown, _first_ids(tokenizer), has_prefix, separator)
        tokenizer.encode_batch_fast(["a text"])  # some settings make the library panic only now
        return made


def _first_ids(tokenizer: HubTokenizer) -> Sequence[int]:
    """Return the ids that the post-processor puts before every text. Raises ValueError if they cannot be used."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bare, ids = (tokenizer.encode("a", add_special_tokens=has_more).ids for has_more in (False, True))
    before = next((place for place in range(len(ids)) if ids[place : place + len(bare)] == bare), 0)
    if before > MOST_PREFIX_IDS:
        raise ValueError(f"it begins every text with {before:,} tokens, and at most {MOST_PREFIX_IDS} are read")
    if any(tokenizer.id_to_token(each) is None for each in ids[:before]):  # the library does not check them
        raise ValueError("it begins every text with an id that its vocabulary lacks")
    return list(ids[:before])


def _encodable(texts: Sequence[str]) -> list[str]:
    """Return texts without surrogates, which the library refuses."""
    return [text.encode("utf-8", errors="replace").decode() for text in texts]


@contextmanager
def _faults(problem: str) -> Iterator[None]:
    """Turn every error of the library, which raises nothing specific, into a CorpusError."""
    try:
        yield
    except CorpusError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CorpusError(
            f"{printable(problem)} ({one_line(str(error))}).",
            "Name a tokenizer.json in the format of the tokenizers library.",
        ) from error


def _separator(tokenizer: HubTokenizer, separator: int | None) -> int | None:
    """Return the id of the token that separates documents, and make it a special token.

    Raises ValueError if the vocabulary lacks the given one.
    """
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    if separator is not None:
        token = tokenizer.id_to_token(separator)
        if token is None:
            raise ValueError(f"it has no token {separator:,}, which is to end documents")
        if token not in special and len(token) > 1:
            tokenizer.add_special_tokens([token])
        return separator
    known = [token for token in SEPARATORS if tokenizer.token_to_id(token) is not None]
    if not known:
        return None
    chosen = next((token for token in known if token in special), known[0])
    if chosen not in special:
        tokenizer.add_special_tokens([chosen])
    return tokenizer.token_to_id(chosen)


def _keep_special_text_apart(tokenizer: HubTokenizer) -> None:
    """Make the model split the literal text of special tokens and of bytes such as ``<0x0A>`` after the first letter.

    A model may find special tokens in its own vocabulary, even if the library does not look for them. The model alone
    is asked, without what the normalizer and the pre-tokenizer put before the text: a model that makes the token
    anywhere in a word also makes it of its text alone.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence as InOrder
    from tokenizers.pre_tokenizers import Split

    model = tokenizer.model
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    texts = [text for text in (*special, *_BYTE_TOKENS) if len(text) > 1 and model.token_to_id(text) is not None]
    forged = [text for text in texts if model.token_to_id(text) in {token.id for token in model.tokenize(text)}]
    if forged:
        pattern = "|".join(f"(?<={re.escape(text[0])}){re.escape(text[1:])}" for text in forged)
        split = Split(Regex(pattern), "isolated")
        before = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = split if before is None else InOrder([before, split])


_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def _marked_copy(tokenizer: HubTokenizer) -> HubTokenizer:
    """Return a copy that reads special tokens where they are not marked, and ends a token at ``BORDER_MARK``.

    ``SPECIAL_MARK`` is removed after special tokens were found in the text as it is, before anything else is done.
    """
    outline = json.loads(tokenizer.to_str())
    for token in outline["added_tokens"]:
        token["normalized"] = token["normalized"] and not token["special"]
    unmark = {"type": "Replace", "pattern": {"String": SPECIAL_MARK}, "content": ""}
    _prepend(outline, "normalizer", "normalizers", unmark)
    split = {"type": "Split", "pattern": {"String": BORDER_MARK}, "behavior": "Removed", "invert": False}
    is_first = "Metaspace" not in _types(outline.get("pre_tokenizer"))  # which may put a space before each part
    _prepend(outline, "pre_tokenizer", "pretokenizers", split, is_first)
    copy = type(tokenizer).from_str(json.dumps(outline))
    copy.encode_special_tokens = False
    return copy


def _prepend(outline: dict[str, Any], name: str, parts: str, part: dict[str, Any], is_first: bool = True) -> None:
    """Put a part before or after a normalizer or pre-tokenizer."""
    rest = [] if outline.get(name) is None else [outline[name]]
    outline[name] = {"type": "Sequence", parts: [part, *rest] if is_first else [*rest, part]}


def _check_added_ids(tokenizer: HubTokenizer, outline: Mapping[str, Any]) -> None:
    """Raise ValueError if the library gives an added token another id than the file does.

    It ignores the file's id, and counts on from the vocabulary.
    """
    for token in outline.get("added_tokens") or ():
        found = tokenizer.token_to_id(token["content"])
        if found != token["id"] and token["content"]:
            raise ValueError(
                f"the added token {token['content']!r} has the id {token['id']} in the file, but gets {found}"
            )


def _unknown(tokenizer: HubTokenizer, outline: Mapping[str, Any], path: Path) -> int | None:
    """Return the id of the unknown token; None if the vocabulary covers all bytes.

    Raises CorpusError without either: the library then drops text, or fails when it meets an unknown character.
    """
    model = outline["model"]
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if model.get("byte_fallback") and vocabulary.keys() >= {*_BYTE_TOKENS}:
        return None
    if "ByteLevel" in {*_types(outline.get("pre_tokenizer")), *_types(outline.get("normalizer"))}:
        letters = _byte_letters()
        if vocabulary.keys() >= {letters[byte] for byte in UTF8_BYTES}:
            return None
    unknown = model.get("unk_id") if "unk_id" in model else vocabulary.get(model.get("unk_token"))
    if unknown is None:
        raise CorpusError(
            f"The tokenizer {path} loses text: it has neither an unknown token nor a token for every byte.",
            "Train it again with unk_token, byte_fallback, or initial_alphabet=ByteLevel.alphabet(), and start a run "
            "with the new file.",
        )
    return int(unknown)


def _parts(component: object) -> Iterator[Mapping[str, Any]]:
    """Yield a normalizer, pre-tokenizer or decoder of the file, and those inside it."""
    if isinstance(component, dict):
        yield component
        for parts in ("normalizers", "pretokenizers", "decoders"):
            for inside in component.get(parts) or ():
                yield from _parts(inside)


def _types(component: object) -> Iterator[str]:
    return (str(part.get("type")) for part in _parts(component))


def _replacement_growth(component: object) -> float:
    """Return the most characters that one can become by a normalizer or decoder that inserts text of the file."""
    growth = 1.0
    for part in _parts(component):
        if part.get("type") == "Replace":
            literal = part["pattern"].get("String")
            inserted = len(part["content"])
            growth *= max(1.0, inserted / len(literal)) if literal else 1.0 + inserted  # a pattern may match nothing
        elif part.get("type") == "Prepend":
            growth += len(part["prepend"])
        elif part.get("type") == "Precompiled":
            growth *= max(1.0, _longest_replacement(part["precompiled_charsmap"]) / CHARSMAP_LENGTH)
    return growth


def _longest_replacement(charsmap: str) -> int:
    """Return the most letters of one character in a table of sentencepiece: length of a trie, trie, ended texts."""
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :].decode("utf-8", errors="replace")
    return max(map(len, texts.split("\0")))


def _save(
    tokenizer: HubTokenizer, directory: Path, separator: str = "", bos: str = "", prefix: Sequence[int] = ()
) -> None:
    """Write the tokenizer's files. Raises OSError, which the library's own ``save`` does not."""
    text = tokenizer.to_str(pretty=True)
    if prefix:
        processor = _before_every_text(tokenizer, prefix)
        text = json.dumps({**json.loads(text), "post_processor": processor}, indent=2, ensure_ascii=False)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: text for name, text in (("bos_token", bos), ("eos_token", separator)) if text}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _before_every_text(tokenizer: HubTokenizer, prefix: Sequence[int]) -> dict[str, Any]:
    """Return the description of a post-processor that puts ids before every text."""
    names = [str(tokenizer.id_to_token(each)) for each in prefix]
    special = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*special, first],
        "pair": [*special, first, *special, second],
        "special_tokens": {
            name: {"id": name, "ids": [each], "tokens": [name]} for name, each in zip(names, prefix, strict=True)
        },
    }


def _byte_letters() -> list[str]:
    """Return GPT-2's stand-in for every byte: the byte itself if it prints, else the next free letter from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = itertools.count(256)
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]
