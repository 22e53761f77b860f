"""The averaged model of a testnet: its held-out loss, the peers' disagreement, and a sample of its text.

Shapes: P parameters, N peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError
from p2ptrain.base.text import one_line
from p2ptrain.data.corpus import Corpus, open_corpus
from p2ptrain.data.dialogues import read_dialogues
from p2ptrain.data.rows import TextCounts
from p2ptrain.data.split import HELD_OUT_TOKENS
from p2ptrain.data.stream import cache_directory
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.generate import Sampling, generate_answer, generate_text
from peer.home import Home
from peer.model import mean, model_of
from peer.testnet.report import Measured

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from p2ptrain.manifest import Corpus as CorpusSpec

SAMPLE_TOKENS = 400
"""Length of the sample, a few lines of bytes. Guess: ask readers whether they want more."""
PROMPT = "\n"
QUESTION_CHARS = 60
"""Longest question that is suggested for ``chat``: it fits on the line."""


def measure(
    signed: SignedManifest,
    homes: Sequence[Home],
    threads: int,  # of torch: a pool on every core spins if the machine has other work
    data: Path | None = None,  # the corpus, if the manifest names one by its digest
    tokenizer: Path | None = None,  # the tokenizer.json, if the manifest names one by its digest
    template: Path | None = None,  # the chat template, likewise
) -> Measured:
    """Average the peers' models and measure the result. Raises UserError if a home holds no fitting weights."""
    torch.set_num_threads(threads)
    trained = [weights_of(home.trained, home.checkpoints) for home in homes]
    final = [weights_of(home.checkpoints) for home in homes]
    model = model_of(signed, mean(trained))
    corpus = open_corpus(signed.manifest, cache_directory(), data, tokenizer, template_file=template)
    return Measured(
        averaged_val_loss=validation_loss(model.module, corpus, HELD_OUT_TOKENS).value,
        disagreement=disagreement(trained),
        final_disagreement=disagreement(final),
        sample=_sample(model.module, corpus).strip(),
        question=_question(signed.manifest.corpus, data),
    )


def _sample(module: PreTrainedModel, corpus: Corpus) -> str:
    """Return a text that the model writes; if the corpus has dialogues, a held-out one with the model's answer."""
    if dialogue := corpus.prompt_ids():
        return generate_answer(module, corpus.tokenizer, dialogue, corpus.end_of_turn, SAMPLE_TOKENS, Sampling())
    return generate_text(module, corpus.tokenizer, PROMPT, SAMPLE_TOKENS, Sampling())


def _question(spec: CorpusSpec, data: Path | None) -> str:
    """Return the first question in a file of dialogues, on one line; empty if there is none at hand."""
    if data is None or spec.kind != "file" or not spec.template:
        return ""
    said = (message for dialogue in read_dialogues(spec, data, TextCounts()) for message in dialogue.messages)
    return next(
        (one_line(" ".join(each["content"].split()), QUESTION_CHARS) for each in said if each["role"] == "user"), ""
    )


def disagreement(
    weights: Sequence[Tensor],  # N of [P]
) -> float:
    """Return the mean over the peers of ||x_i - mean|| / ||mean||."""
    middle = mean(weights)
    distances = [torch.linalg.vector_norm(each - middle) for each in weights]
    return float(torch.stack(distances).mean() / torch.linalg.vector_norm(middle))


def weights_of(*directories: Path) -> Tensor:
    """Return the slow weights, [P], of the newest whole checkpoint in the first directory that has one.

    A peer that was stopped early has no ``trained`` directory; its last checkpoint stands in.
    """
    for directory in directories:
        found = checkpoint.load_latest(directory).checkpoint
        if found is not None:
            return found.tensors["slow"]
    raise HomeError(f"{directories[-1].parent} holds no complete checkpoint.", "Read its output.log for the reason.")
