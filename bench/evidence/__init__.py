"""Evidence: experiments R1 to R10, which compare training methods in simulation. ``python -m bench.evidence``.

A **cell** is one run: a contender (a recipe with its numbers and codec) in a setting (peers, H, disturbances) with a
seed. An experiment is a set of cells and the tables and figures made from them.

==============  ================================================================================
cells           data types: contender, setting, cell
contenders      the methods that compete
tuning          the grids on which every method is tuned, and the numbers chosen from them
experiments     cells, tables and figures of R1 to R10
published       R4: published utilizations against the closed-form cost model
scenario        cell -> scenario of the simulator
headline        report of the simulator -> the numbers that are kept
fingerprint     the code that an entry was made with; entries of other code are shown, and verified or made anew
verify          keeps entries of other code if today's code computes the same short runs
run             runs missing cells and keeps one JSON file an experiment
summary         mean and standard error over seeds
pages, figures  ``docs/results/*.md`` and ``docs/results/figures/*.svg`` from the JSON files
==============  ================================================================================

Three rules keep the comparison fair. Tuning reads the validation split; final numbers come from the test split and from
other seeds. All contenders in one column of a table train on equally many tokens. "Better" means by more than two
standard errors of the difference.
"""
