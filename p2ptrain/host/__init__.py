"""The node's side of training: weights that partners get, and what the network does to them.

``state.HostState`` holds slow weights, momentum and the vector theta on the host. ``learner.Learner`` asks a task for
inner steps and moves that state at a phase's end, a showing, a displacement and an adoption; ``outer_phase`` says what
a recipe makes of each. ``payloads`` turns weights into exchanges, ``inbox`` brings their results, ``loop`` runs it all.
``keeper`` does the same for a share of the weights, without a trainer.

Nothing here knows the model: that is ``p2ptrain.train``, which trainers import.
"""
