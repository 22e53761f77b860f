"""Training on one machine: the model and its inner optimization, which a trainer's process runs.

``flat_model`` builds the manifest's model as views of one vector theta, and ``LanguageModelTask`` trains theta in
place. What becomes of theta between peers is ``p2ptrain.host``'s.

Most modules import torch; transformers is imported only when a model is built.
"""
