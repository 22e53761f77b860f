"""Training on one machine: the model, the inner optimization, and the learner that connects it to the outer one.

In the order in which a peer uses them:

1. ``choose_device`` selects an available device for the owner's setting (``autofit``);
2. ``flat_model`` builds the manifest's model with its seeded initial weights, all views of one vector theta;
3. ``place`` finds the autocast type and how many sequences fit the device at once;
4. ``LanguageModelTask`` trains theta in place, one optimizer step at a time, on the sequences that the peer's id
   selects;
5. ``learner``, with its ``inbox`` and its ``weights``, folds the result of H such steps into the slow weights and
   applies what exchanges deliver (DiLoCo's outer step, arXiv 2311.08105, with gossip instead of the all-reduce);
   ``loop`` runs it on the trainer thread;
6. ``validation_loss`` and ``generate_text`` show what the model has learned.

Importing this package imports torch; transformers is imported only when a model is built.
"""

from p2ptrain.train.autofit import Placement, choose_device, place
from p2ptrain.train.evaluate import HeldOutText, validation_loss
from p2ptrain.train.generate import Sampling, generate_text, generate_tokens
from p2ptrain.train.inner import CorpusReader, InnerStepResult, LanguageModelTask, learning_rate
from p2ptrain.train.model import FlatModel, build_module, flat_model

__all__ = [
    "CorpusReader",
    "FlatModel",
    "HeldOutText",
    "InnerStepResult",
    "LanguageModelTask",
    "Placement",
    "Sampling",
    "build_module",
    "choose_device",
    "flat_model",
    "generate_text",
    "generate_tokens",
    "learning_rate",
    "place",
    "validation_loss",
]
