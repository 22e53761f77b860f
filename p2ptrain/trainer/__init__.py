"""Trainers: programs that train for a node and know no swarm, and the line and memory that both share

A trainer is a plain torch program in a process of its own. It may die at any time: weights and moments live in memory
that the node has mapped too (``host_vector``), and all else that it needs to go on is in its last answer. Node and
trainer speak JSON lines (``line``): the node asks, the trainer answers (``attached``), one question at a time. The node
starts, watches and ends it (``process``).
"""
