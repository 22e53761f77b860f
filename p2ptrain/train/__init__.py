"""Training on one machine: the model, the inner optimization, and the learner that connects it to the outer one.

``flat_model`` builds the manifest's model as views of one vector theta, ``LanguageModelTask`` trains theta in place,
and ``learner.Learner`` folds the result of H such steps into the slow weights and applies what exchanges deliver
(DiLoCo's outer step, arXiv 2311.08105, with gossip instead of the all-reduce). ``loop`` runs it on the trainer thread.

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
