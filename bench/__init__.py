"""Benchmarks: ``python -m bench`` prints and writes targets and measured values.

============  ============================================================================================
goodput       payload of an exchange over p2pd against a bare stream in the same pattern
goodput_line  payload of an exchange on a line of 100 Mbit/s with and without delay, against bare TCP (root)
trainer       cost of gossip for the trainer, for two presets
couple        swarm of two peers that ``trainer`` measures
codecs        speed of encoding weights and of decoding differences
peer          demo peer as a process: memory, seconds to its first step and first exchange, bytes
directory     DHT traffic of presence records, from 8 to 10,000 peers
card          speed and loss on a card
table         figures as rows with target and measured value
pictures      screenshots of the page in ``docs/images``
page          cost of the page for the browser and for the server (chromium)
carry         who carries a run's text: 100 peers that join at once, in simulation (``python -m bench.carry``)
results       writes measured figures into the pages of ``docs/results``
evidence      experiments R1 to R10, which compare training methods (``python -m bench.evidence``)
rivals        swarm, DiLoCo and hivemind's averager over real networks (``python -m bench.rivals``)
============  ============================================================================================

Every figure is a ratio within one run, or has a counterpart in it, so that the speed of the machine cancels. Each is
measured in its own process, one after the other, on an otherwise idle machine.
"""
