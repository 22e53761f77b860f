"""Training on one machine: the model, the inner optimization, and the learner that connects it to the outer one.

``flat_model`` builds the manifest's model as views of one vector theta, ``LanguageModelTask`` trains theta in place,
and ``learner.Learner`` folds the result of H such steps into the slow weights and applies what exchanges deliver
(DiLoCo's outer step, arXiv 2311.08105, with gossip instead of the all-reduce). ``loop`` runs it on the training thread.

Most modules import torch; transformers is imported only when a model is built.
"""
