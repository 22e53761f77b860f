"""Training in a process of its own: the language model's trainer, and the task by which the node sees it"""
