"""Encoded dialogues on disk, until all are read and the length of rows is known."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.data.chat_template import Dialogue
from p2ptrain.data.chat_tokens import BATCH_CHARACTERS, ChatEncoder
from p2ptrain.data.dialogues import characters
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.packed_stream import LongDialogue, encoded_dialogues
from p2ptrain.data.reading import TextMix
from p2ptrain.data.rows import TextCounts
from p2ptrain.data.tokenizing import Tell, ahead, batches
from p2ptrain.data.unfinished import Unfinished
from p2ptrain.tokens.packing import EncodedDialogue

SAVED_BYTES = 4 << 20
"""Bytes of the spool between two saved states."""

_HEAD = struct.Struct("<IIII")


def dialogue_size(dialogue: Dialogue) -> int:
    return sum(characters(each) + 256 for each in dialogue.messages) + characters(dialogue.tools)


def spool_dialogues(
    mix: TextMix[Dialogue],
    encoder: ChatEncoder,
    longest: int,
    counts: TextCounts,
    check: FidelityCheck,
    most_tokens: int | None,
    unfinished: Unfinished,
    tell: Tell,
) -> bool:
    """Encode the dialogues into the spool; return whether these were all, not ``most_tokens``.

    Args:
        longest: tokens that are kept of a dialogue.
        most_tokens: after which reading stops; None: it does not.

    Raises:
        CorpusError: a row is broken, or the template does not render it.
        HomeError: the spool cannot be written.
    """
    saved = unfinished.load()
    tokens, size = (saved[0]["tokens"], saved[0]["bytes"]) if saved else (0, 0)
    try:
        with unfinished.spool.open("r+b" if saved else "wb") as file:
            file.truncate(size)
            file.seek(size)
            for batch in ahead(batches(mix, dialogue_size, BATCH_CHARACTERS)):
                dialogues = [taken.item for taken in batch.items]
                for each in encoded_dialogues(encoder, dialogues, counts, check):
                    tokens += min(each.tokens, longest)
                    file.write(_packed(each, longest))
                    if most_tokens is not None and tokens >= most_tokens:
                        return False
                if batch.state is not None and file.tell() - size >= SAVED_BYTES:
                    size = file.tell()
                    file.flush()
                    os.fsync(file.fileno())
                    state = {"mix": batch.state, "check": check.state(), "counts": asdict(counts)}
                    unfinished.save({**state, "tokens": tokens, "bytes": size})
                by_limit = 0.0 if most_tokens is None else tokens / most_tokens
                tell(tokens, max(batch.done_share, by_limit))
    except OSError as error:
        raise HomeError(f"{unfinished.spool} cannot be written: {files.cause(error)}.", files.remedy(error)) from error
    return True


def read_spool(path: Path) -> Iterator[LongDialogue]:
    """Yield the dialogues. Raises OSError."""
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kept, tokens, text_bytes, is_cut = _HEAD.unpack(head)
            codes = np.frombuffer(file.read(4 * kept), dtype="<u4")
            yield LongDialogue(EncodedDialogue(codes >> 1, (codes & 1).astype(bool)), tokens, text_bytes, bool(is_cut))


def _packed(dialogue: LongDialogue, longest: int) -> bytes:
    ids, counts = dialogue.encoded.ids[:longest], dialogue.encoded.counts[:longest]
    codes = ids.astype("<u4") << 1 | counts
    return _HEAD.pack(len(ids), dialogue.tokens, dialogue.text_bytes, dialogue.is_cut) + codes.tobytes()
