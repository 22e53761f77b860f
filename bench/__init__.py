"""The project's figures, measured: ``python -m bench`` prints one table of targets and values and writes them as JSON.

============  ============================================================================================
goodput       an exchange's payload over p2pd against a bare stream in the same pattern
goodput_line  the same on a line of 100 Mbit/s with and without delay, against bare TCP (root)
trainer       what gossip costs the trainer, in the model sizes of two presets
couple        the swarm of two that ``trainer`` measures
codecs        how fast weights become bytes and two messages become a difference
peer          a demo peer as a process: memory, seconds to its first step and first exchange, bytes
table         figures as rows: what was asked for, what was measured
pictures      the pictures of the page in ``docs/images``, taken anew
page          what the page costs whoever looks, and whoever serves it (chromium)
results       writes those rows, and those of demo runs, into ``docs/RESULTS.md``
evidence      which method trains how well: experiments R1 to R11 (a package of its own, ``python -m bench.evidence``)
============  ============================================================================================

Every figure is a ratio, or has its counterpart, within one run: the machine's speed then cancels. Each is measured in a
process of its own, one after the other. Leave the machine alone meanwhile.
"""
