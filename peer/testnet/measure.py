"""The averaged model of a testnet: its held-out loss, the peers' disagreement, and a sample of its text.

Shapes: P parameters, N peers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError, WeightsError
from p2ptrain.manifest import SignedManifest
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS
from p2ptrain.tokens.opened import end_of_turn
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.generate import sample_text
from peer.home import Home
from peer.model import mean, model_of, run_text, run_tokenizer
from peer.testnet.report import Measured

SAMPLE_TOKENS = 400
"""Length of the sample, a few lines of bytes. Guess: ask readers whether they want more."""


def measure(
    signed: SignedManifest,
    homes: Sequence[Home],
    threads: int,  # of torch: a pool on every core spins if the machine has other work
) -> Measured:
    """Average the peers' models and measure the result.

    Raises UserError if a home holds no fitting weights, or the first one not what the run names, or if the average's
    loss is not finite.
    """
    torch.set_num_threads(threads)
    trained = [weights_of(home.trained, home.checkpoints) for home in homes]
    final = [weights_of(home.checkpoints) for home in homes]
    module = model_of(signed, mean(trained)).module
    corpus, tokenizer = run_text(homes[0], signed.manifest), run_tokenizer(homes[0], signed)
    loss = validation_loss(module, corpus, HELD_OUT_TOKENS).value
    if not math.isfinite(loss):
        raise WeightsError("Its held-out loss is not a finite number.", "Lower training.learning_rate.")
    dialogue = corpus.prompt_ids()
    return Measured(
        averaged_val_loss=loss,
        disagreement=disagreement(trained),
        final_disagreement=disagreement(final),
        sample=sample_text(module, tokenizer, dialogue, end_of_turn(signed.manifest), SAMPLE_TOKENS).strip(),
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
