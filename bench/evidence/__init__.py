"""The evidence: which method trains how well, from runs that anyone can repeat. ``python -m bench.evidence``.

A **cell** is one run: a contender (a recipe with its numbers and codec), a setting (how many peers, H, what is wrong
with them) and a seed. Cells are data, in ``experiments``, one small file for each of R1 to R11 and one for the tuning.
Everything else turns cells into tables::

    cells        what a contender, a setting and a cell are
    contenders   the methods that compete
    grid         the grid on which all of them are tuned, and what was best on it
    experiments  the cells of R1-R11, and the tables and figures that are made of them
    scenario     cell -> the scenario that the simulator takes
    headline     the simulator's report -> the few numbers that are kept
    identity     of a scenario, of the code that decides the numbers, of the machine
    store        one JSON file a cell, written whole or not at all
    plan         which cell comes next, and what all of them will cost
    pool         worker processes with one thread of torch each; worker is their side of it
    run          plan + store + pool: what ``python -m bench.evidence`` does
    summary      means and standard errors, and when one figure is better than another
    rule         from the summary to the default recipe, its numbers and its codec; the goals
    tables       ``python -m bench.evidence.tables``: the evidence part of docs/RESULTS.md
    figures      the drawings beside it

Three rules keep it honest. Tuning sees the validation split, final numbers come from the test split and from other
seeds. In one column of a table all contenders see the same tokens. "Better" means by more than two standard errors.
"""
